"""Make the random models that the benchmarks run on, so that no hub is needed.

"qwen3-26m" keeps 4,096 bytes of bf16 K/V per token and 4 query heads per KV head, so that
16,384 tokens x 8 sequences are 512 MiB; "qwen3-0.6b" has exactly the shape of Qwen3-0.6B. Hybrids of the
smaller size: Qwen3-Next's (gated delta rule in three of four layers), Falcon-H1's (Mamba-2 beside attention)
and Jamba's (Mamba-1 in seven of eight layers, no experts). The weights are random, scaled so that greedy
output neither repeats one token nor overflows. The tokenizer is byte-level and knows a word for every id. The
query statistics, of models that only attend, are measured on random tokens: they cost what real ones cost and
mean nothing. With --packed, also packed models of Qwen3's shape: NAME-awq and NAME-q4_k_m.gguf.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from itertools import islice, product
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Form
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FalconH1Config,
    GenerationConfig,
    JambaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
)
from transformers.utils.logging import disable_progress_bar

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.model.loader import load_model
from kvreclaim.model_paths import STATS_FILE

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import tiny_gguf

MAX_POSITION = 163_840
EMBEDDING_STD = 0.1
NORM_GAIN = 1.25
END_TOKEN = "<|endoftext|>"
GROUP = 128
SEED = 0
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


def empty_network(directory: Path) -> Qwen3ForCausalLM:
    """Return the model's modules without memory."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(AutoConfig.from_pretrained(directory))


def plain_weights(directory: Path, network: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """Return the weights that are in no linear layer: norms and embeddings."""
    linear = {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name not in linear}  # noqa: SIM118


def write_awq(directory: Path, out: Path) -> None:
    """Write a checkpoint as AutoAWQ packs: groups of 128, embeddings and head in bf16."""
    network, generator = empty_network(directory), torch.Generator().manual_seed(SEED)
    tensors = plain_weights(directory, network)
    for name, module in network.named_modules():
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        rows, columns = module.weight.shape
        words = torch.randint(-(2**31), 2**31, (columns, rows // 8), generator=generator).to(torch.int32)
        tensors[f"{name}.qweight"] = words
        tensors[f"{name}.qzeros"] = torch.full((columns // GROUP, rows // 8), 0x77777777, dtype=torch.int32)
        size = columns**-0.5 / 4.6  # codes of 0 to 15 deviate by 4.6
        tensors[f"{name}.scales"] = torch.full((columns // GROUP, rows), size, dtype=torch.float16)
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(directory, out, ignore=shutil.ignore_patterns("*.safetensors*"))
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    settings = {"bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True}
    config["quantization_config"] = {"quant_method": "awq", **settings}
    (out / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def write_gguf(directory: Path, out: Path) -> None:
    """Write a GGUF file, mixed as llama.cpp's Q4_K_M is: embeddings and head of 6 bits, of values and down
    projections every second layer, everything else of 4."""
    network, random = empty_network(directory), np.random.default_rng(SEED)
    plain = plain_weights(directory, network)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, network.config.num_hidden_layers)
    writer = gguf.GGUFWriter(out, "qwen3")
    tiny_gguf.write_config(writer, network.config)
    tiny_gguf.write_rotation(writer, network.config, "none")
    _write_tokenizer(writer, directory)
    for name, parameter in network.named_parameters():
        stored = names.get_name(name, (".weight",))
        if parameter.dim() == 1:
            writer.add_tensor(stored, plain[name].float().numpy())
            continue
        form = _form_of(name)
        std = EMBEDDING_STD if "embed" in name else parameter.shape[1] ** -0.5
        writer.add_tensor(stored, _blocks(form, tuple(parameter.shape), std, random), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _form_of(name: str) -> Form:
    if "embed" in name:
        return Form.Q6_K
    layer = int(name.split(".")[2])
    larger = name.endswith(("v_proj.weight", "down_proj.weight")) and layer % 2 == 0
    return Form.Q6_K if larger else Form.Q4_K


def _blocks(form: Form, shape: tuple[int, int], std: float, random: np.random.Generator) -> np.ndarray:
    """Return random codes, [N, bytes], with scales such that weights deviate by std around zero."""
    rows, blocks = shape[0], shape[1] // 256
    if form is Form.Q6_K:  # codes of 6 bits, 16 scales, d: w = d scale (q - 32)
        made = random.integers(256, size=(rows, blocks, 210), dtype=np.uint8)
        made[..., 192:208] = 32
        made[..., 208:] = np.frombuffer(np.float16(std / 18.5 / 32).tobytes(), np.uint8)
    else:  # d, m, scales and mins of 32, codes of 4 bits: w = d 32 q - m 32
        made = random.integers(256, size=(rows, blocks, 144), dtype=np.uint8)
        pair = np.array([std / 4.6 / 32, 7.5 * std / 4.6 / 32], np.float16)
        made[..., :4] = np.frombuffer(pair.tobytes(), np.uint8)
        made[..., 4:12], made[..., 12:16] = 32 | 2 << 6, 0
    return made.reshape(rows, -1)


def _write_tokenizer(writer: gguf.GGUFWriter, directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    vocab = tokenizer.get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens[-2] = "th"  # transformers asks for one merge at least
    kinds = [gguf.TokenType.CONTROL if t == tokenizer.eos_token else gguf.TokenType.NORMAL for t in tokens]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(["t h"])
    writer.add_eos_token_id(vocab[tokenizer.eos_token])


def pack(directory: Path) -> None:
    """Write packed random models of the model's shape, which have its costs."""
    writers = {f"{directory.name}-awq": write_awq, f"{directory.name}-q4_k_m.gguf": write_gguf}
    for name, write in writers.items():
        if (out := directory.with_name(name)).exists():
            print(f"{out} exists")
        else:
            write(directory, out)
            print(out)


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
    parser.add_argument("--packed", action="store_true", help="of models that only attend")
    args = parser.parse_args()
    if unknown := sorted(set(args.names) - set(CONFIGS)):
        parser.error(f"no model is called {unknown[0]!r}; pass {' or '.join(CONFIGS)}")
    disable_progress_bar()
    for name in args.names:
        directory = args.out / name
        if directory.exists():
            print(f"{directory} exists")
        else:
            make(
                name,
                directory,
                seed=args.seed,
                calibration_tokens=args.calibration_tokens,
                centers=args.centers,
            )
        if args.packed and name in PLAIN:
            pack(directory)


if __name__ == "__main__":
    main()
