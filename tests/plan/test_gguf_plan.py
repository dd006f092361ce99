"""A GGUF file is planned as the model that it holds: heads, windows, context and bytes, from its header."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Form
from test_planned_families import OWN
from test_shapes import SMALL, on_meta
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.errors import KVReclaimError
from kvreclaim.plan.configs import ARCHITECTURES, load_shape, shape_of
from kvreclaim.plan.weights import weight_bytes, weight_format

runner = CliRunner()
KINDS = {kind: name for name, kind in ARCHITECTURES.items()} | {"mixtral": "llama"}
SIZES = {"head_dim": 32, "moe_intermediate_size": 32, "hidden_size": 64}
WINDOW = {"sliding_window": 8}
WINDOWED = ("gemma2", "gemma3_text", "phi3", "gpt_oss")
EXPERTS = ("mixtral", "qwen3_moe", "gpt_oss")


def config_of(kind: str):
    """Return a small config with fields that GGUF files have."""
    fields = {**SMALL, **OWN.get(kind, {}), **(WINDOW if kind in WINDOWED else {"sliding_window": None})}
    own = {"use_sliding_window": False, "mlp_only_layers": []}
    return CONFIG_MAPPING[kind](**{**fields, **{key: value for key, value in own.items() if key in fields}})


def write(file: Path, kind: str, *, without: str = "", beside: bool = False) -> dict[str, int]:
    """Write zeros as llama.cpp's converter does, in Q8_0 where rows are long. Returns: bytes by tensor."""
    config = config_of(kind)
    writer = gguf.GGUFWriter(file, KINDS[kind])
    header = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": getattr(config, "head_dim", None),
        "attention.sliding_window": config.sliding_window if kind in WINDOWED else None,
        "expert_count": getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None),
        "expert_used_count": getattr(config, "num_experts_per_tok", None),
        "expert_feed_forward_length": getattr(config, "moe_intermediate_size", None),
    }
    for key, value in header.items():
        if value is not None and key != without:
            writer.add_uint32(f"{KINDS[kind]}.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    written = {}
    for name, shape in tensors(kind, config):
        raw = Form.Q8_0 if len(shape) > 1 and shape[-1] % 32 == 0 else Form.F32
        data = np.zeros(shape, np.float32)
        data = gguf.quantize(data, raw) if raw is Form.Q8_0 else data
        writer.add_tensor(name, data, raw_dtype=raw)
        written[name] = data.nbytes
    if beside:
        writer.add_tensor("blk.0.more.weight", np.zeros(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def tensors(kind: str, config) -> list[tuple[str, tuple[int, ...]]]:
    """Return the tensors of the model that transformers builds, under llama.cpp's names."""
    architecture = {name: key for key, name in gguf.MODEL_ARCH_NAMES.items()}[KINDS[kind]]
    names, found = gguf.get_tensor_name_map(architecture, config.num_hidden_layers), []
    for name, parameter in on_meta(config).named_parameters():
        layer = next(filter(str.isdigit, name.split(".")), "")
        if ".experts.gate_up_proj" in name and "bias" not in name:
            size = config.num_local_experts if kind == "gpt_oss" else parameter.shape[0]
            half = (size, parameter.numel() // size // config.hidden_size // 2, config.hidden_size)
            found += [(f"blk.{layer}.ffn_{part}_exps.weight", half) for part in ("gate", "up")]
        elif ".experts." in name:
            part = "gate_up" if "gate_up" in name else "down"
            found.append(
                (
                    f"blk.{layer}.ffn_{part}_exps.{'bias' if 'bias' in name else 'weight'}",
                    tuple(parameter.shape),
                )
            )
        else:
            stored = names.get_name(name, (".weight", ".bias")) or f"blk.{layer}.{name.split('.', 3)[3]}"
            found.append((stored, tuple(parameter.shape)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_the_model_that_it_was_made_of(tmp_path: Path, kind: str) -> None:
    written = write(tmp_path / "m.gguf", kind)
    found = load_shape(tmp_path / "m.gguf")
    oracle = shape_of(json.loads(config_of(kind).to_json_string(use_diff=False)), "m")
    assert found.layers == oracle.layers
    assert (found.max_position, found.vocab_size, found.tied) == (512, 272, oracle.tied)
    assert found.num_params == oracle.num_params
    sizes = weight_bytes(found, weight_format("auto", found))
    routed = sum(size for name, size in written.items() if "_exps." in name)
    assert (sizes.total, sizes.routed) == (sum(written.values()), routed)
    assert sizes.dense == sizes.total - routed - (0 if found.tied else written["token_embd.weight"])
    assert (routed > 0) == (kind in EXPERTS)


def test_no_torch_is_needed(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "gemma3_text")
    code = (
        "import sys\nfor name in ('torch', 'transformers'): sys.modules[name] = None\n"
        "from kvreclaim.cli.main import app\n"
        f"app(['plan', {str(tmp_path / 'm.gguf')!r}, '--gpu', '4090', '--context', '100', '--explain'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "5 x (4 heads, 2 KV heads of 256, window 8)" in done.stdout
    assert "weights: the file's tensors, " in done.stdout


def test_a_simulation_takes_it_too(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "qwen2")
    drawn = ("--requests", "3", "--rate", "5", "--prompt", "20", "--output", "5")
    result = runner.invoke(app, ["simulate", "--model", str(tmp_path / "m.gguf"), "--gpu", "4090", *drawn])
    assert result.exit_code == 0, result.output
    assert "3 requests" in result.stdout


def test_weights_may_be_given(tmp_path: Path) -> None:
    """Then they are counted as of any model."""
    write(tmp_path / "m.gguf", "llama")
    shape = load_shape(tmp_path / "m.gguf")
    assert weight_bytes(shape, weight_format("bf16", shape)).total == 2 * shape.num_params


@pytest.mark.parametrize("without", ["context_length", "block_count", "attention.head_count"])
def test_what_a_file_lacks_is_no_default(tmp_path: Path, without: str) -> None:
    write(tmp_path / "m.gguf", "llama", without=without)
    with pytest.raises(KVReclaimError, match=f"does not say {without}"):
        load_shape(tmp_path / "m.gguf")


def test_what_does_not_add_up_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", "llama", beside=True)
    with pytest.raises(KVReclaimError, match="weights, where its header describes a llama of"):
        load_shape(tmp_path / "m.gguf")
    (tmp_path / "n.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:500])
    with pytest.raises(KVReclaimError, match="cannot be read as GGUF"):
        load_shape(tmp_path / "n.gguf")
    writer = gguf.GGUFWriter(tmp_path / "o.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(KVReclaimError, match="architecture 'mamba'"):
        load_shape(tmp_path / "o.gguf")
