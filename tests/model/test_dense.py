"""Llama, Mistral, Qwen2 and Qwen3 without transformers' modules: their numbers are the same, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvreclaim.model.attention import register_attention
from kvreclaim.model.config_fields import config_fields, measured_fields
from kvreclaim.model.dense import DenseConfig, DenseModel, is_dense
from kvreclaim.model.ends import gguf_ends
from kvreclaim.model.layer_trial import TrialBatch
from kvreclaim.model.loader import load_model
from kvreclaim.model.probe import probe
from kvreclaim.model.quantized.gguf_file import GgufSource, gguf_config
from kvreclaim.ops import extension

BIASES = {"attention_bias": True}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, head dim": ("llama", {"head_dim": 32}),
    "llama, biases": ("llama", {**BIASES, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama 3": ("llama", {"rope_parameters": tiny._LLAMA3}),
    "llama, linear": ("llama", {"rope_parameters": tiny_gguf.TWO_ROTATIONS["full_attention"]}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2, tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, yarn": ("qwen2", tiny_gguf.YARN),
    "qwen3": ("qwen3", {}),
    "qwen3, biases": ("qwen3", BIASES),
}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "another family": ("phi3", {}),
    "windows in every layer": ("mistral", {}),
    "windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": tiny.WINDOW, "max_window_layers": 1},
    ),
    "another activation": ("qwen3", {"hidden_act": "gelu"}),
    "a rotation that depends on the text": (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}},
    ),
}
HEAVY = {"transformers.modeling_utils", "torch._dynamo", "scipy"}
BY_CONFIGS = {"transformers.models", "torch.distributed.tensor", "accelerate"}
"""What transformers' configs import."""


def both(family: str, overrides: dict[str, Any], dtype: torch.dtype) -> tuple[Any, DenseModel]:
    """transformers' model with random biases and norms, and ours with its weights."""
    torch.manual_seed(7)
    theirs = AutoModelForCausalLM.from_config(tiny.build(family, **overrides).config, dtype=dtype)
    with torch.no_grad():
        for each in theirs.parameters():
            if each.dim() == 1:
                each.copy_(1 + torch.randn_like(each))
    theirs.set_attn_implementation(register_attention())
    ours = DenseModel(theirs.config, dtype)
    assert all(each.is_meta for each in ours.parameters())
    ours.load_state_dict(theirs.state_dict(), assign=True)
    if theirs.config.tie_word_embeddings:  # assigning has untied them
        ours.lm_head.weight = ours.model.embed_tokens.weight
    return theirs.eval(), ours.eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_numbers_are_those_of_transformers(case: str, dtype: torch.dtype) -> None:
    theirs, ours = both(*CASES[case], dtype)
    places = torch.tensor([[0, 1, 2, 5, 70, 400]])
    tokens = torch.tensor([tiny.prompts((6,), seed=3)[0]])
    for kept in (0, 1, torch.tensor([1, 4])):
        runs = []
        for model in (theirs, ours):
            batch = TrialBatch()
            given = {"position_ids": places, "use_cache": False, "logits_to_keep": kept, "kv_batch": batch}
            runs.append((model(input_ids=tokens, **given).logits, batch.calls))
        (want, calls), (got, own) = runs
        assert torch.equal(got, want)
        assert got.shape[1] == (6, 1, 2)[(0, 1).index(kept) if isinstance(kept, int) else 2]
        for layer, call in calls.items():
            assert all(torch.equal(getattr(own[layer], part), getattr(call, part)) for part in "qkv")
            assert astuple(own[layer].softmax) == astuple(call.softmax)


@pytest.mark.parametrize("case", CASES)
def test_names_and_facts_are_those_of_transformers(case: str) -> None:
    theirs, ours = both(*CASES[case], torch.float32)
    assert dict(ours.named_parameters()).keys() == dict(theirs.named_parameters()).keys()
    found, want = probe(ours, "tiny"), probe(theirs, "tiny")
    assert found.fingerprint == want.fingerprint
    assert found.layers[0].rope is not None
    assert (ours.device, ours.dtype) == (theirs.device, theirs.dtype)


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_stay_transformers(case: str) -> None:
    family, overrides = OTHERS[case]
    assert not is_dense(tiny.build(family, **overrides).config)


@pytest.mark.skipif(extension.unavailable_reason() is not None, reason="the native extension is not there")
@pytest.mark.parametrize("kind", ["llama as GGUF", "qwen3 as GGUF", "llama as safetensors"])
def test_a_start_imports_no_module_of_transformers(kind: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    family, _, form = kind.partition(" as ")
    model = tmp_path / "tiny.gguf"
    if form == "GGUF":
        tiny_gguf.write(model, family=family)
        load_model(model)  # transformers makes its config and tokenizer, which are kept
    else:
        tiny.save_model(family, model := tmp_path / "tiny")
    program = (
        "import sys\nfrom kvreclaim import LLM, SamplingParams\n"
        f"llm = LLM({str(model)!r}, num_blocks=16)\n"
        "llm.generate(['the end'], SamplingParams(max_tokens=4))\n"
        f"heavy = {HEAVY | BY_CONFIGS if form == 'GGUF' else HEAVY!r}\n"
        "print(*sorted(heavy & sys.modules.keys()), type(llm.loaded.model).__name__)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.stdout.splitlines()[-1:] == ["DenseModel"], done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("eos", [2, tiny_gguf.EOS])
def test_a_kept_config_is_that_of_transformers(family: str, eos: int, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    tiny_gguf.write(tmp_path / "tiny.gguf", family=family, ends={"eos": eos})
    source = GgufSource(tmp_path / "tiny.gguf")
    kept, whole = gguf_config(source), gguf_config(source, of_transformers=True)
    assert isinstance(kept, DenseConfig)
    assert not isinstance(whole, DenseConfig)
    assert config_fields(kept) == config_fields(whole)
    assert measured_fields(kept) == measured_fields(whole)
    for name in whole.to_dict().keys() - {"_name_or_path", "id2label"}:
        assert getattr(kept, name) == getattr(whole, name), name
    assert gguf_ends(source.index.fields, None, kept) == gguf_ends(source.index.fields, None, whole)
    changed = load_model(tmp_path / "tiny.gguf", hf_overrides={"rms_norm_eps": 0.001})
    assert changed.facts.overridden == ("rms_norm_eps",)
    assert changed.model.model.norm.eps == 0.001


@pytest.mark.parametrize("dtype", ["auto", "float32", "float16"])
@torch.inference_mode()
def test_a_plain_checkpoint_has_the_same_weights_as_transformers(dtype: str, tmp_path: Path) -> None:
    tiny.build("qwen2").bfloat16().save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours, theirs = (
        load_model(tmp_path, dtype=dtype),
        AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype),
    )
    assert isinstance(ours.model, DenseModel)
    found, want = ours.model.state_dict(), theirs.state_dict()
    assert found.keys() == want.keys()
    assert all(
        torch.equal(found[name], want[name]) and found[name].dtype is want[name].dtype for name in want
    )


def test_weights_loaded_in_inference_mode_are_plain_tensors(tiny_dir: Callable[[str], Path]) -> None:
    with torch.inference_mode():
        loaded = load_model(tiny_dir("llama"))
    assert isinstance(loaded.model, DenseModel)
    assert not any(each.is_inference() for each in loaded.model.parameters())


@torch.inference_mode()
def test_a_checkpoint_with_other_names_is_loaded_by_transformers(tmp_path: Path) -> None:
    """The names of all weights but the head are without "model."."""
    tiny.save_model("llama", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): each for name, each in load_file(file).items()}, file)
    loaded = load_model(tmp_path)
    assert not isinstance(loaded.model, DenseModel)
    assert torch.equal(loaded.model.model.norm.weight, load_file(file)["norm.weight"])
