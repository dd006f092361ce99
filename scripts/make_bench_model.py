"""Make the random models that the benchmarks run on, so that no hub is needed.

"qwen3-26m" keeps 4,096 bytes of bf16 K/V per token and 4 query heads per KV head, so that
16,384 tokens x 8 sequences are 512 MiB; "qwen3-0.6b" has exactly the shape of Qwen3-0.6B. Hybrids of the
smaller size: Qwen3-Next's (gated delta rule in three of four layers), Falcon-H1's (Mamba-2 beside attention)
and Jamba's (Mamba-1 in seven of eight layers, no experts). The weights are random, scaled so that greedy
output neither repeats one token nor overflows. The tokenizer is byte-level and knows a word for every id. The
query statistics, of models that only attend, are measured on random tokens: they cost what real ones cost and
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from itertools import islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    FalconH1Config,
    GenerationConfig,
    JambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
)
from transformers.utils.logging import disable_progress_bar

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.model.loader import load_model
from kvreclaim.model_paths import STATS_FILE

MAX_POSITION = 163_840
EMBEDDING_STD = 0.1
NORM_GAIN = 1.25
END_TOKEN = "<|endoftext|>"
LETTERS = ("bdfgklmnprstvz", "aeiou")


_ATTENTION = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
_SMALL = {**_ATTENTION, "vocab_size": 16_384, "hidden_size": 512, "num_hidden_layers": 8}
CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-26m": (Qwen3Config, {**_SMALL, "intermediate_size": 1024}),
    # 8 KV heads of 128 in 28 layers are 112 KiB of bf16 per token.
    "qwen3-0.6b": (
        Qwen3Config,
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    # Heads of 128, as in published models: a sequence's states are 1.5 MiB.
    "qwen3-next-26m": (
        Qwen3NextConfig,
        {
            **_SMALL,
            "intermediate_size": 832,
            "num_experts": 0,
            "mlp_only_layers": [],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
    # States of 1.5 MiB, too.
    "falcon-h1-26m": (
        FalconH1Config,
        {
            **_SMALL,
            "intermediate_size": 768,
            "num_hidden_layers": 6,
            "mamba_d_ssm": 512,
            "mamba_n_heads": 8,
            "mamba_d_head": 64,
            "mamba_d_state": 128,
            "mamba_n_groups": 1,
        },
    ),
    "jamba-27m": (JambaConfig, {**_SMALL, "intermediate_size": 512, "num_experts": 1}),
}
PLAIN = ("qwen3-26m", "qwen3-0.6b")
"""These only attend."""


def build_network(name: str, seed: int) -> PreTrainedModel:
    """A randomly initialised network in bf16; every sub-layer adds about one unit to the residual."""
    torch.manual_seed(seed)
    config_class, fields = CONFIGS[name]
    end = fields["vocab_size"] - 1
    config = config_class(
        **fields,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    network = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for part, weight in network.named_parameters():
            if part.endswith("A_log"):  # logarithms of decays
                continue
            if weight.ndim > 1:
                std = EMBEDDING_STD if "embed" in part else weight[0].numel() ** -0.5
                weight.normal_(std=std)
            elif part.endswith(("q_norm.weight", "k_norm.weight")):
                weight.add_(NORM_GAIN - 1.0)
    network.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end, do_sample=False)
    return network.to(torch.bfloat16)


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Bytes are the first 256 ids; the others are made-up words that text never encodes to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    syllables = ["".join(pair) for pair in product(*LETTERS)]
    words = ("Ġ" + "".join(parts) for parts in product(syllables, repeat=3))
    for word in islice(words, vocab_size - len(vocab) - 1):
        vocab[word] = len(vocab)
    vocab[END_TOKEN] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        clean_up_tokenization_spaces=False,
        model_max_length=MAX_POSITION,
    )


def make(name: str, directory: Path, *, seed: int, calibration_tokens: int, centers: int) -> None:
    """Write weights, tokenizer and statistics; the directory appears whole or not at all."""
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    network = build_network(name, seed)
    network.save_pretrained(partial)
    vocab_size = network.config.vocab_size
    build_tokenizer(vocab_size).save_pretrained(partial)
    num_parameters = sum(p.numel() for p in network.parameters())
    _write_index(network, partial)
    del network
    if name in PLAIN:
        _calibrate(partial, vocab_size, seed, calibration_tokens, centers)
    partial.rename(directory)
    print(f"{directory}: {num_parameters / 1e6:.1f} M parameters")


def _calibrate(directory: Path, vocab_size: int, seed: int, calibration_tokens: int, centers: int) -> None:
    window = min(1024, calibration_tokens)
    tokens = torch.randint(256, vocab_size - 1, (calibration_tokens // window, window)).tolist()
    stats = calibrate(
        load_model(directory, dtype="float32"), tokens, num_centers=centers, seed=seed, show_progress=True
    )
    stats.save(directory / STATS_FILE)


def _write_index(network: PreTrainedModel, directory: Path) -> None:
    """Name the weights' file: vLLM reads every .safetensors file of a directory that has no index, and the
    statistics are one."""
    tied = set(network._tied_weights_keys or ())
    names = [name for name in network.state_dict() if name not in tied]
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}
    text = json.dumps(index, indent=1) + "\n"
    (directory / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "names",
        nargs="*",
        default=PLAIN,
        metavar="NAME",
        help=f"default: {', '.join(PLAIN)}",
    )
    parser.add_argument("--out", type=Path, default=Path("bench_models"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration-tokens", type=int, default=2048)
    parser.add_argument("--centers", type=int, default=16)
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(CONFIGS)):
        parser.error(f"no model is called {unknown[0]!r}; pass {' or '.join(CONFIGS)}")
    disable_progress_bar()
    for name in args.names:
        directory = args.out / name
        if directory.exists():
            print(f"{directory} exists")
            continue
        make(
            name,
            directory,
            seed=args.seed,
            calibration_tokens=args.calibration_tokens,
            centers=args.centers,
        )


if __name__ == "__main__":
    main()
