"""Make packed random models of a bench model's shape: what a step costs does not depend on the weights.

    python scripts/pack_bench_model.py bench_models/qwen3-0.6b

writes bench_models/qwen3-0.6b-awq, as AutoAWQ packs (groups of 128, embeddings and head in bf16), and
bench_models/qwen3-0.6b-q4_k_m.gguf, mixed as llama.cpp's Q4_K_M is: embeddings and head of 6 bits, of values
and down projections every second layer, everything else of 4. Weights are as large as the bench model's.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Form
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoTokenizer, Qwen3ForCausalLM

GROUP = 128
SEED = 0
EMBEDDING_STD = 0.1
NAMES = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, 64)
"""Of tensors: from transformers' to llama.cpp's, of as many layers and more."""


def empty_network(directory: Path) -> Qwen3ForCausalLM:
    """The bench model's modules without memory."""
    with torch.device("meta"):
        return Qwen3ForCausalLM(AutoConfig.from_pretrained(directory))


def plain_weights(directory: Path, network: Qwen3ForCausalLM) -> dict[str, torch.Tensor]:
    """What is no linear layer: norms and embeddings, as they are."""
    from safetensors import safe_open

    linear = {f"{name}.weight" for name, module in network.named_modules() if isinstance(module, nn.Linear)}
    with safe_open(directory / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name not in linear}  # noqa: SIM118


def write_awq(directory: Path, out: Path) -> None:
    """A checkpoint directory."""
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
    """A GGUF file of llama.cpp."""
    network, random = empty_network(directory), np.random.default_rng(SEED)
    plain = plain_weights(directory, network)
    writer = gguf.GGUFWriter(out, "qwen3")
    _write_config(writer, network.config)
    _write_tokenizer(writer, directory)
    for name, parameter in network.named_parameters():
        stored = _stored_name(name)
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
    """[N, bytes] of random codes, their scales such that weights deviate by std around zero."""
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


def _write_config(writer: gguf.GGUFWriter, config: AutoConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


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


def _stored_name(name: str) -> str:
    found = NAMES.get_name(name, (".weight",))
    assert found is not None, name
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="what make_bench_model.py made")
    directory: Path = parser.parse_args().model
    awq, file = (
        directory.with_name(f"{directory.name}-awq"),
        directory.with_name(f"{directory.name}-q4_k_m.gguf"),
    )
    for out, write in ((awq, write_awq), (file, write_gguf)):
        if out.exists():
            print(f"{out} exists")
            continue
        write(directory, out)
        print(out)


if __name__ == "__main__":
    main()
