"""Options that do not go with centred keys are refused with the reason. The engines do not start."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import transformers
from biased import make_biased_model
from configs import NGRAM, SETTINGS, SMALL, make_config, make_model, mla_config
from engines import Engine
from models import make_stats, make_tiny_model, make_tokenizer
from vllm.config.cache import CacheDType
from vllm.distributed import cleanup_dist_env_and_memory

from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError, UnsupportedModelError
from kvreclaim.integrations.vllm.refusals.centred_keys import (
    QUANTISED,
    configure_centred_keys,
    refuse_layers_of_centred_keys,
)

CENTRING = "kvreclaim.integrations.vllm.entry.cpu_worker.CentringCPUWorker"


def centred(model: Path, value: object = True, compression: object = None, **more: Any) -> Any:
    """A configuration with the option, of an fp8 cache unless another is named."""
    own = {} if compression is None else {"kv_compression": compression}
    settings = {"kv_cache_dtype": "fp8", "additional_config": {"centred_keys": value, **own}, **more}
    return make_config(model, None, **settings)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kv_cache_dtype": "auto"}, "--kv-cache-dtype auto: keys that are stored as they are gain nothing"),
        ({"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype bfloat16: keys that are stored as they are"),
        ({"kv_offloading_size": 1.0}, "a KV connector, such as --kv-offloading-size: blocks of other"),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size = 2"),
        ({"speculative_config": {**NGRAM, "method": "ngram_gpu"}}, "method 'ngram_gpu'"),
        ({"worker_cls": "some.other.Worker"}, "centred_keys runs in the workers"),
    ],
)
def test_options_are_refused_with_the_reason(options: dict[str, Any], word: str, tiny_model: Path) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        centred(tiny_model, **options)
    assert word in str(caught.value)
    assert re.search("; (remove|use|leave)", str(caught.value)), "says what to do"
    assert "kv_compression" not in str(caught.value)


def test_every_cache_dtype_of_vllm_is_taken_or_refused(tiny_model: Path) -> None:
    config = centred(tiny_model)
    assert config.parallel_config.worker_cls == CENTRING
    for dtype in get_args(CacheDType):
        object.__setattr__(config.cache_config, "cache_dtype", dtype)
        if dtype in QUANTISED:
            configure_centred_keys(config)
            continue
        with pytest.raises(InvalidArgumentError, match=f"does not work with --kv-cache-dtype {dtype}: "):
            configure_centred_keys(config)


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Any:
    return centred(tiny_model)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size = 2"),
        ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size = 2"),
        ("parallel_config.enable_elastic_ep", True, "elastic expert parallelism"),
        ("kernel_config.monokernel", True, "--monokernel"),
        ("model_config.is_encoder_decoder", True, "an encoder-decoder model"),
        ("model_config.is_hybrid", True, "recurrent layers"),
        ("model_config.is_attention_free", True, "without attention"),
    ],
)
def test_what_this_build_cannot_configure(
    path: str, value: object, word: str, config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set after the fact: on a CPU vLLM itself refuses them, or needs a model that cannot be made small."""
    configure_centred_keys(config)
    *owners, name = path.split(".")
    owner: Any = config
    for step in owners:
        owner = getattr(owner, step)
    is_derived = isinstance(getattr(type(owner), name, None), property)
    monkeypatch.setattr(type(owner) if is_derived else owner, name, value, raising=False)
    with pytest.raises((InvalidArgumentError, UnsupportedModelError), match=word):
        configure_centred_keys(config)


def test_latents_are_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", mla_config(), "DeepseekV2ForCausalLM")
    with pytest.raises(UnsupportedModelError, match="multi-head latent attention"):
        centred(model)


@pytest.mark.parametrize("value", [3, None, {}, ["a"]])
def test_other_values_are_refused(value: object, tiny_model: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="must be true, or the path of a file"):
        centred(tiny_model, value)


def test_false_is_off(tiny_model: Path) -> None:
    config = centred(tiny_model, False, kv_cache_dtype="auto")
    assert config.parallel_config.worker_cls == make_config(tiny_model, None).parallel_config.worker_cls


def test_where_centres_come_from(
    tiny_model: Path, tiny_stats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is named, that of compression, that beside the weights, the weights."""

    def settled(*args: Any) -> object:
        return centred(tiny_model, *args).additional_config["centred_keys"]

    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    assert settled() is True
    assert settled(str(tiny_stats)) == str(tiny_stats)
    of_policy = {**SETTINGS, "policy": "query_mixture", "stats": str(tiny_stats)}
    config = centred(tiny_model, True, of_policy)
    assert config.additional_config["centred_keys"] == str(tiny_stats)
    assert config.parallel_config.worker_cls.endswith(".ReclaimCPUWorker")
    older = tmp_path / "older.safetensors"
    stats = QueryStats.load(tiny_stats)
    metadata = stats.metadata.model_copy(update={"keys": False})
    replace(stats, metadata=metadata, k_mean=None, k_energy=None, q_energy=None).save(older)
    with pytest.raises(InvalidArgumentError, match="hold no means of keys; run `kvreclaim calibrate`"):
        settled(str(older))
    assert settled(True, {**of_policy, "stats": str(older)}) is True
    with pytest.raises((InvalidArgumentError, StatsMismatchError), match="nowhere"):
        settled(str(tmp_path / "nowhere.safetensors"))


class Attention(SimpleNamespace):
    """The attributes of a layer that are read."""

    attn_type = "decoder"
    kv_sharing_target_layer_name: str | None = None
    _k_scale = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("layer", "word"),
    [
        (SimpleNamespace(), "layers of the class SimpleNamespace in layer.0: they may store more"),
        (Attention(attn_type="encoder_only"), "attention of type 'encoder_only'"),
        (Attention(kv_sharing_target_layer_name="layer.1"), "a cache shared with another layer"),
        (Attention(kv_cache_update_bypass=True), "a fused write to the cache"),
        (Attention(_k_scale=torch.tensor([1.0, 0.5])), r"scales of keys \(k_scale\) in the checkpoint"),
    ],
)
def test_layers_are_refused_by_name(layer: Any, word: str) -> None:
    refuse_layers_of_centred_keys({"layer.0": Attention()})
    with pytest.raises((InvalidArgumentError, UnsupportedModelError), match=word):
        refuse_layers_of_centred_keys({"layer.0": layer})


@pytest.fixture
def refused() -> Iterator[Callable[..., str]]:
    """Why an engine does not start."""

    def start(model: Path, error: type[Exception], **more: Any) -> str:
        with pytest.raises(error) as caught:
            Engine(model, kv_cache_dtype="fp8", **more)
        return str(caught.value)

    yield start
    cleanup_dist_env_and_memory()


def test_statistics_of_another_model(tmp_path: Path, refused: Callable[..., str]) -> None:
    model, other = make_biased_model(tmp_path / "model"), make_tiny_model(tmp_path / "other")
    stats = make_stats(other, tmp_path / "stats.safetensors", num_tokens=1024)
    why = refused(model, StatsMismatchError, centred_keys=str(stats))
    assert "rank 0: " in why
    assert "do not fit the model" in why


def test_neither_biases_nor_norms(tmp_path: Path, refused: Callable[..., str]) -> None:
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2, head_dim=32)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    why = refused(tmp_path / "model", UnsupportedModelError, centred_keys=True)
    assert "neither biases nor norms of queries and keys were found" in why
    assert "run `kvreclaim calibrate` and name its file as centred_keys, or leave centred_keys out" in why
