"""Facts that a worker probes of vLLM's model are those that calibration found in transformers' model of the
same checkpoint: shapes, scale, rotation, and so the fingerprint by which statistics know their model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from models import make_stats, random_prompts
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
from vllm.v1.worker.cpu_worker import CPUWorker

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError, UnsupportedModelError
from kvreclaim.integrations.vllm.entry.facts import Described, describe
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.model.loader import LoadedModel, load_model

probing = family.module("probing")

SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "factor": 4.0,
    "short_factor": [1.0 + 0.05 * band for band in range(16)],
    "long_factor": [2.0 + 0.1 * band for band in range(16)],
    "original_max_position_embeddings": 128,
}
EXPERTS = {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WIDE = {"num_attention_heads": 2, "num_key_value_heads": 1}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, heads wider than the model": ("Qwen3Config", {"head_dim": 64}),
    "qwen3 of experts": ("Qwen3MoeConfig", EXPERTS),
    "qwen2, with biases": ("Qwen2Config", {}),
    "llama, llama3 scaling": ("LlamaConfig", {"rope_parameters": LLAMA3}),
    "llama, YaRN scaling": ("LlamaConfig", {"rope_parameters": YARN}),
    "llama, linear scaling": ("LlamaConfig", {"rope_parameters": LINEAR}),
    "mistral without a window": ("MistralConfig", {"sliding_window": None}),
    "gemma": ("GemmaConfig", {"head_dim": 32}),
    "granite, own scale": ("GraniteConfig", {"attention_multiplier": 0.3}),
    "phi3, three quarters of a head": ("Phi3Config", {"partial_rotary_factor": 0.75, **WIDE}),
    "glm4, half of a head, interleaved": ("Glm4Config", {"head_dim": 32}),
    "ernie, interleaved": ("Ernie4_5Config", {"head_dim": 32}),
    "phi by vLLM's transformers backend": ("PhiConfig", {"partial_rotary_factor": 0.5}),
    "smollm3, one layer without rotation": ("SmolLM3Config", {"no_rope_layers": [1, 0]}),
}


def save_model(kind: str, fields: dict[str, Any], path: Path) -> Path:
    """A random model in bf16 whose every bias and norm shows."""
    torch.manual_seed(5)
    config = getattr(transformers, kind)(**{**SHAPE, **fields})
    network = transformers.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for weight in network.parameters():
            if weight.dim() > 1:
                weight.mul_(2.0)
            else:
                weight.add_(torch.randn_like(weight), alpha=0.3)
    network.to(torch.bfloat16).save_pretrained(path)
    return path


def check_rotations(model: torch.nn.Module) -> None:
    """vLLM's bf16 kernel rotates eight pairs at a time, beyond the end of pairs that are no such multiple."""
    sizes = {layer.rotary_dim for layer in model.modules() if isinstance(layer, RotaryEmbeddingBase)}
    assert all(size % 16 == 0 for size in sizes), f"vLLM's kernels do not take {sizes} rotary dims"


@contextmanager
def loaded_by_vllm(path: Path, dtype: str = "bfloat16", **more: Any) -> Iterator[Any]:
    """vLLM's model runner with the model and an empty cache. more: of EngineArgs."""
    config = EngineArgs(
        model=str(path),
        dtype=dtype,
        max_model_len=256,
        block_size=32,
        skip_tokenizer_init=True,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 24,
        **more,
    ).create_engine_config()
    try:
        with set_current_vllm_config(config), TemporaryDirectory() as folder:
            worker = CPUWorker(config, 0, 0, f"file://{folder}/rendezvous", is_driver_worker=True)
            worker.init_device()
            worker.load_model()
        check_rotations(worker.get_model())
        runner = worker.model_runner
        specs = worker.get_kv_cache_spec()
        group = KVCacheGroupSpec([*specs], next(iter(specs.values())))
        runner.kv_cache_config = KVCacheConfig(num_blocks=0, kv_cache_tensors=[], kv_cache_groups=[group])
        yield runner
    finally:
        cleanup_dist_env_and_memory()


def save_stats(loaded: LoadedModel, path: Path) -> Path:
    calibrate(loaded, random_prompts([128]), num_centers=2).save(path)
    return path


def described(runner: Any, stats: Path | None, policy: str = "triattention") -> Described:
    return describe(runner, Options(CompressionConfig(policy=policy), None if stats is None else str(stats)))


def restored(runner: Any) -> bool:
    layers = probing.attention_layers(runner)
    return not any(isinstance(layer.impl, probing.AttentionRecorder) for layer in layers)


@pytest.mark.parametrize("name", MODELS)
def test_facts_and_fingerprint_are_those_of_calibration(name: str, tmp_path: Path) -> None:
    path = save_model(*MODELS[name], tmp_path / "model")
    loaded = load_model(path, device="cpu")
    stats = save_stats(loaded, tmp_path / "stats.safetensors")
    with loaded_by_vllm(path) as runner:
        facts = described(runner, stats).facts
        assert restored(runner)
    assert facts.fingerprint == loaded.facts.fingerprint
    assert facts.rope_problem is None
    for ours, theirs in zip(facts.layers, loaded.facts.layers, strict=True):
        assert (ours.num_heads, ours.num_kv_heads) == (theirs.num_heads, theirs.num_kv_heads)
        assert (ours.head_dim, ours.v_head_dim) == (theirs.head_dim, theirs.v_head_dim)
        assert ours.softmax.scale == pytest.approx(theirs.softmax.scale)
        assert ours.softmax.softcap == theirs.softmax.softcap
        assert ours.rope is not None
        assert theirs.rope is not None
        assert (ours.rope.style, ours.rope.start) == (theirs.rope.style, theirs.rope.start)
        assert torch.equal(ours.rope.inv_freq, theirs.rope.inv_freq)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_change_nothing(dtype: str, tmp_path: Path) -> None:
    path = save_model(*MODELS["ernie, interleaved"], tmp_path / "model")
    loaded = load_model(path, device="cpu")
    stats = save_stats(loaded, tmp_path / "stats.safetensors")
    with loaded_by_vllm(path, dtype) as runner:
        found = described(runner, stats)
        assert found.facts.fingerprint == loaded.facts.fingerprint
        assert found.facts.dtype == getattr(torch, dtype)


def test_layers_that_may_get_adapters_are_probed_without_one(tiny_model: Path, tiny_stats: Path) -> None:
    """Fewer tokens fit a step, and so the layers' buffers, than there are tokens to choose from."""
    fingerprint = load_model(tiny_model, device="cpu").facts.fingerprint
    with loaded_by_vllm(tiny_model, enable_lora=True, max_num_batched_tokens=64) as runner:
        assert described(runner, tiny_stats).facts.fingerprint == fingerprint


def test_statistics_come_whole_and_by_layer(tiny_model: Path, tiny_stats: Path) -> None:
    whole = QueryStats.load(tiny_stats)
    with loaded_by_vllm(tiny_model) as runner:
        stats = described(runner, tiny_stats, "query_mixture").stats
    assert stats is not None
    assert len(stats) == whole.metadata.num_layers
    for index, layer in enumerate(stats):
        expected = whole.layer(index)
        for tensor in ("q_mean", "q_abs_mean", "centers", "center_var", "center_weight", "q_cov"):
            assert torch.equal(getattr(layer, tensor), getattr(expected, tensor)), tensor


def test_another_models_statistics_are_refused(tiny_model: Path, tiny_stats: Path, tmp_path: Path) -> None:
    other = save_model("Qwen3Config", {"head_dim": 64, "rope_theta": 77.0}, tmp_path / "other")
    foreign = make_stats(other, tmp_path / "other.safetensors", num_tokens=1024)
    with loaded_by_vllm(tiny_model) as runner:
        with pytest.raises(StatsMismatchError, match=r"rank 0: query statistics of 'other' .*fingerprint"):
            described(runner, foreign)
        assert restored(runner)
        with pytest.raises(InvalidArgumentError, match=r"rank 0: .*gone\.safetensors' does not exist"):
            described(runner, tmp_path / "gone.safetensors")
        assert described(runner, tiny_stats).stats is not None


def test_statistics_have_to_hold_what_the_policy_needs(tiny_model: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare.safetensors"
    calibrate(load_model(tiny_model, device="cpu"), random_prompts([128]), num_centers=0).save(bare)
    with loaded_by_vllm(tiny_model) as runner:
        with pytest.raises(InvalidArgumentError, match="needs statistics with centres"):
            described(runner, bare, "query_mixture")
        assert described(runner, bare, "triattention").stats is not None


def test_without_statistics_the_model_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_model("OPTConfig", {"word_embed_proj_dim": 128}, tmp_path / "model")  # learned positions
    with loaded_by_vllm(path) as runner:
        monkeypatch.setattr(runner, "get_model", lambda: pytest.fail("get_model was called"))
        found = described(runner, None, "streaming_llm")
        monkeypatch.undo()
        assert found.stats is None
        assert found.facts.num_layers == 2
        assert "set stats" in str(found.facts.rope_problem)
        with pytest.raises(UnsupportedModelError, match=r"no known rotation|frequencies are not known"):
            described(runner, tmp_path / "any.safetensors")
        assert restored(runner)


def test_a_rotation_that_depends_on_the_length_is_refused(tmp_path: Path) -> None:
    """vLLM takes the long frequencies for a window of 256, calibration the short ones of up to 128 tokens."""
    fields = {"rope_parameters": LONG, "original_max_position_embeddings": 128}
    path = save_model("Phi3Config", fields, tmp_path / "model")
    stats = save_stats(load_model(path, device="cpu"), tmp_path / "stats.safetensors")
    with loaded_by_vllm(path) as runner:
        with pytest.raises(UnsupportedModelError, match="no known rotation explains"):
            described(runner, stats)
        assert described(runner, None, "knorm").stats is None


def test_a_model_that_cannot_be_run_is_refused_with_its_words(
    tiny_model: Path, tiny_stats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(**unused: Any) -> None:
        raise RuntimeError("no text without an image")

    with loaded_by_vllm(tiny_model) as runner:
        monkeypatch.setattr(runner.get_model(), "forward", broken)
        with pytest.raises(UnsupportedModelError, match=r"RuntimeError: no text without an image.*leave out"):
            described(runner, tiny_stats)
        assert restored(runner)
