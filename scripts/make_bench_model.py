"""Make the random models that the benchmarks run on, so that no hub is needed.

Qwen3-shaped: "26m" keeps 4,096 bytes of bf16 K/V per token and 4 query heads per KV head, so that
16,384 tokens x 8 sequences are 512 MiB; "0.6b" has exactly the shape of Qwen3-0.6B. The weights are random,
scaled so that greedy output neither repeats one token nor overflows. The tokenizer is byte-level and knows
a word for every id. The query statistics are measured on random tokens: they cost what real ones cost and
mean nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass
from itertools import islice, product
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.model.loader import load_model
from kvreclaim.model_paths import STATS_FILE

MAX_POSITION = 163_840
EMBEDDING_STD = 0.1
NORM_GAIN = 1.25
END_TOKEN = "<|endoftext|>"
LETTERS = ("bdfgklmnprstvz", "aeiou")


@dataclass(frozen=True, slots=True)
class Shape:
    """What differs between the models; 8 KV heads of 128 in 28 layers are 112 KiB of bf16 per token."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int


SHAPES = {
    "26m": Shape(16_384, 512, 1024, 8, 8, 2, 64),
    "0.6b": Shape(151_936, 1024, 3072, 28, 16, 8, 128),
}


def build_network(shape: Shape, seed: int) -> Qwen3ForCausalLM:
    """A randomly initialised network in bf16; every sub-layer adds about one unit to the residual."""
    torch.manual_seed(seed)
    fields = {name: getattr(shape, name) for name in Shape.__slots__}
    config = Qwen3Config(
        **fields,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=shape.vocab_size - 1,
        pad_token_id=shape.vocab_size - 1,
    )
    network = Qwen3ForCausalLM(config)
    with torch.no_grad():
        for name, weight in network.named_parameters():
            if weight.ndim == 2:
                std = EMBEDDING_STD if "embed" in name else weight.shape[1] ** -0.5
                weight.normal_(std=std)
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.fill_(NORM_GAIN)
    end = config.eos_token_id
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
    shape = SHAPES[name]
    partial = directory.with_name(directory.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    network = build_network(shape, seed)
    network.save_pretrained(partial)
    build_tokenizer(shape.vocab_size).save_pretrained(partial)
    num_parameters = sum(p.numel() for p in network.parameters())
    _write_index(network, partial)
    del network
    window = min(1024, calibration_tokens)
    tokens = torch.randint(256, shape.vocab_size - 1, (calibration_tokens // window, window)).tolist()
    stats = calibrate(
        load_model(partial, dtype="float32"), tokens, num_centers=centers, seed=seed, show_progress=True
    )
    stats.save(partial / STATS_FILE)
    partial.rename(directory)
    print(f"{directory}: {num_parameters / 1e6:.1f} M parameters, {centers} centres per head")


def _write_index(network: Qwen3ForCausalLM, directory: Path) -> None:
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
        "names", nargs="*", default=list(SHAPES), metavar="NAME", help="26m, 0.6b; default: both"
    )
    parser.add_argument("--out", type=Path, default=Path("bench_models"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration-tokens", type=int, default=2048)
    parser.add_argument("--centers", type=int, default=16)
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(SHAPES)):
        parser.error(f"no model is called {unknown[0]!r}; pass {' or '.join(SHAPES)}")
    disable_progress_bar()
    for name in args.names:
        directory = args.out / f"qwen3-{name}"
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
