"""Options that do not compose with the plugin are refused with the reason. Configurations only, no engine."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
import transformers
from configs import NGRAM, SCHEDULER, SMALL, make_config, make_model, mla_config
from vllm.config.cache import CacheDType
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.integrations.vllm.refusals.loaded import (
    refuse_groups,
    refuse_layers,
    refuse_scheduler,
    refuse_unnamed_groups,
)
from kvreclaim.integrations.vllm.refusals.predicates import CACHE_DTYPES
from kvreclaim.integrations.vllm.refusals.table import refuse_config
from kvreclaim.integrations.vllm.settings.groups import layer_kinds, most_other_blocks


def several(*names: str) -> dict[str, Any]:
    """A --kv-transfer-config of these connectors."""
    each = [{"kv_connector": name, "kv_role": "kv_both"} for name in names]
    more = {"connectors": each}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_connector_extra_config": more}


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (
            {"speculative_config": {**NGRAM, "method": "ngram_gpu"}},
            "method 'ngram_gpu' of --speculative-config",
        ),
        (
            {"speculative_config": {**NGRAM, "disable_padded_drafter_batch": True}},
            "disable_padded_drafter_batch in --speculative-config",
        ),
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size = 2"),
        (
            {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}},
            "the KV connector NixlConnector: it hands over whole prompts",
        ),
        (
            {"kv_transfer_config": several("OffloadingConnector", "LMCacheConnectorV1")},
            "the KV connector LMCacheConnectorV1: it takes hits whole",
        ),
        (
            {"kv_transfer_config": several("ExampleConnector", "DecodeBenchConnector")},
            "the KV connector DecodeBenchConnector of vLLM",
        ),
        (
            {"kv_transfer_config": several("ExampleConnector"), "tensor_parallel_size": 2},
            "the KV connector ExampleConnector and --tensor-parallel-size 2: all ranks write the same files",
        ),
        (
            {"kv_offloading_size": 1.0, "async_scheduling": False, "speculative_config": NGRAM},
            "drafts of a request that is hidden from the connector",
        ),
        (
            {"ec_transfer_config": {"ec_connector": "ExampleConnector", "ec_role": "ec_both"}},
            "an encoder-cache connector",
        ),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype nvfp4: a block keeps the scales of all its tokens"),
        ({"kv_cache_dtype": "fp8_ds_mla"}, "--kv-cache-dtype fp8_ds_mla: a slot holds the latent of MLA"),
        (
            {"kv_cache_dtype": "ultraquant_4bit"},
            "--kv-cache-dtype ultraquant_4bit: it is not tested",
        ),
        ({"kv_sharing_fast_prefill": True}, "--kv-sharing-fast-prefill"),
        ({"scheduler_cls": "some.other.Scheduler"}, "--scheduler-cls"),
        ({"worker_cls": "some.other.Worker"}, "--worker-cls"),
    ],
)
def test_options_that_do_not_compose_are_refused_with_the_reason(
    options: dict[str, Any], word: str, tiny_model: Path
) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        make_config(tiny_model, **options)
    assert word in str(caught.value)
    assert re.search("; (remove|use|leave)", str(caught.value)), "says what to do"


@pytest.mark.parametrize(
    "options",
    [{"kv_offloading_size": 1.0}, {"pipeline_parallel_size": 2}, {"kv_cache_dtype": "nvfp4"}],
)
def test_the_same_options_are_fine_without_compression(options: dict[str, Any], tiny_model: Path) -> None:
    assert make_config(tiny_model, None, **options).scheduler_config.scheduler_cls is None


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_these_cache_dtypes_are_taken(dtype: str, tiny_model: Path) -> None:
    own = "float16" if dtype == "float16" else "bfloat16"  # vLLM 0.33 takes no other one of 16 bits
    config = make_config(tiny_model, dtype=own, kv_cache_dtype=dtype)
    assert config.scheduler_config.scheduler_cls == SCHEDULER


def test_every_cache_dtype_of_vllm_is_taken_or_refused_with_a_reason(tiny_model: Path) -> None:
    for dtype in set(get_args(CacheDType)) - set(CACHE_DTYPES):
        with pytest.raises(InvalidArgumentError, match=f"does not work with --kv-cache-dtype {dtype}"):
            make_config(tiny_model, kv_cache_dtype=dtype)


@pytest.mark.parametrize(
    ("path", "value", "word"),
    [
        ("parallel_config.decode_context_parallel_size", 2, "--decode-context-parallel-size = 2"),
        ("parallel_config.prefill_context_parallel_size", 2, "--prefill-context-parallel-size = 2"),
        ("parallel_config.ubatch_size", 2, "dual-batch overlap"),
        ("parallel_config.enable_elastic_ep", True, "elastic expert parallelism"),
        ("aux_output_config.enable_return_routed_experts", True, "routed experts"),
        ("attention_config.hisparse_config", SimpleNamespace(), "HiSparse"),
        ("kernel_config.monokernel", True, "--monokernel"),
        ("model_config.runner_type", "pooling", "runner type 'pooling'"),
        ("model_config.is_encoder_decoder", True, "an encoder-decoder model"),
        ("model_config.is_diffusion", True, "a diffusion language model"),
        ("model_config.is_mm_prefix_lm", True, "both directions"),
        ("model_config.model_arch_config.rswa_window", 64, "R-SWA"),
        ("model_config.hf_text_config.alibi", True, "ALiBi"),
        ("model_config.hf_config.dual_chunk_attention_config", {}, "dual-chunk attention"),
    ],
)
def test_what_this_build_cannot_configure_is_refused_as_well(
    path: str, value: object, word: str, tiny_model: Path
) -> None:
    """Set after the fact: on a CPU vLLM itself refuses them, or needs a model that cannot be made small."""
    config = make_config(tiny_model, None)
    refuse_config(config)
    *owners, name = path.split(".")
    owner: Any = config
    for step in owners:
        owner = getattr(owner, step)
    object.__setattr__(owner, name, value)
    with pytest.raises((InvalidArgumentError, UnsupportedModelError), match=word):
        refuse_config(config)


def test_a_draft_model_is_taken(tiny_model: Path) -> None:
    drafter = {"method": "draft_model", "model": str(tiny_model), "num_speculative_tokens": 2}
    assert make_config(tiny_model, speculative_config=drafter).scheduler_config.scheduler_cls == SCHEDULER


# Models that are refused.


def qwen3(**more: Any) -> transformers.PretrainedConfig:
    return transformers.Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=32, **more)


@pytest.mark.parametrize(
    ("make", "architecture", "word"),
    [
        (mla_config, "DeepseekV2ForCausalLM", "multi-head latent attention"),
        (
            lambda: transformers.MambaConfig(vocab_size=512, hidden_size=64, num_hidden_layers=2),
            "MambaForCausalLM",
            "a model without attention",
        ),
        (
            lambda: qwen3(sliding_window=64, use_sliding_window=True, max_window_layers=0),
            "Qwen3ForCausalLM",
            r"sliding-window layers \(all, with a window of 64 tokens\)",
        ),
    ],
    ids=["MLA", "Mamba", "all windows"],
)
def test_models_with_other_caches_are_refused_by_name(
    make: Callable[[], transformers.PretrainedConfig], architecture: str, word: str, tmp_path: Path
) -> None:
    model = make_model(tmp_path / "model", make(), architecture)
    with pytest.raises(UnsupportedModelError, match=word):
        make_config(model)
    assert make_config(model, None).scheduler_config.scheduler_cls is None


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    model = make_model(
        tmp_path / "model", qwen3(sliding_window=64, use_sliding_window=False), "Qwen3ForCausalLM"
    )
    assert make_config(model).scheduler_config.scheduler_cls == SCHEDULER


# Full attention beside sliding windows.


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of which one has full attention."""
    config = qwen3(sliding_window=64, use_sliding_window=True, max_window_layers=1)
    config.num_hidden_layers, config.layer_types = 3, ["full_attention", *["sliding_attention"] * 2]
    return make_model(tmp_path_factory.mktemp("windows") / "model", config, "Qwen3ForCausalLM")


def test_full_attention_beside_windows_is_taken(windows: Path) -> None:
    config = make_config(windows)
    assert config.scheduler_config.scheduler_cls == SCHEDULER
    assert layer_kinds(config.model_config) == (1, 2, 64)
    each = spec(SlidingWindowSpec, sliding_window=64, block_size=config.cache_config.block_size)
    most = each.max_admission_blocks_per_request(config.max_in_flight_tokens, 10**9)
    assert most_other_blocks(config) == 2 * most
    refuse_unnamed_groups(config, cache_config(spec(), spec(SlidingWindowSpec, sliding_window=64)))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"speculative_config": NGRAM}, "--speculative-config"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
    ],
)
def test_beside_windows_these_are_refused(options: dict[str, Any], word: str, windows: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=f"{word} for a model whose layers are of several kinds"):
        make_config(windows, **options)


def test_groups_that_layer_types_do_not_name_are_refused(tiny_model: Path) -> None:
    config = make_config(tiny_model, None)
    refuse_unnamed_groups(config, cache_config(spec()))
    with pytest.raises(UnsupportedModelError, match="layer_types do not name"):
        refuse_unnamed_groups(config, cache_config(spec(), spec(SlidingWindowSpec, sliding_window=64)))


# Refusals that only the engine core and the workers can make.


def spec(kind: type = FullAttentionSpec, **more: Any) -> Any:
    usual = {"block_size": 32, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    return kind(**{**usual, **more})


def cache_config(*specs: Any) -> Any:
    groups = [KVCacheGroupSpec([f"model.layers.{n}.attn"], one) for n, one in enumerate(specs)]
    return KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def test_one_group_of_full_attention_is_taken() -> None:
    refuse_groups(cache_config(spec()))
    refuse_groups(cache_config(spec(kv_quant_mode=KVQuantMode.FP8_PER_TENSOR)))
    refuse_groups(cache_config(spec(kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD, state_content_bytes=136)))


def test_layers_that_differ_in_kv_dtype_alone_are_taken() -> None:
    """TurboQuant has such layers: its first and last ones keep the model's dtype."""
    packed = spec(dtype=torch.uint8, kv_quant_mode=KVQuantMode.TURBOQUANT_4BIT_NC, state_content_bytes=70)
    layers = {"model.layers.0.attn": spec(), "model.layers.1.attn": packed}
    refuse_groups(cache_config(UniformTypeKVCacheSpecs.from_specs(layers)))
    layers["model.layers.1.attn"] = spec(kv_quant_mode=KVQuantMode.NVFP4)
    with pytest.raises(UnsupportedModelError, match="the cache quantisation NVFP4"):
        refuse_groups(cache_config(UniformTypeKVCacheSpecs.from_specs(layers)))


def test_one_group_of_full_attention_beside_windows_is_taken() -> None:
    refuse_groups(cache_config(*[spec(SlidingWindowSpec, sliding_window=64)] * 2, spec()))


@pytest.mark.parametrize(
    ("specs", "word"),
    [
        ([], "has 0"),
        ([spec(), spec()], r"has 2 \(FullAttentionSpec, FullAttentionSpec\)"),
        ([spec(SlidingWindowSpec, sliding_window=64)] * 2, r"has 2 \(SlidingWindowSpec, SlidingWindowSpec\)"),
        (
            [spec(), spec(ChunkedLocalAttentionSpec, attention_chunk_size=64)],
            "FullAttentionSpec, ChunkedLocalAttentionSpec",
        ),
        (
            [spec(), spec(SlidingWindowSpec, sliding_window=64, block_size=64)],
            r"one block size, in which it counts; this model has \[32, 64\]",
        ),
        (
            [spec(sliding_window=64), spec(SlidingWindowSpec, sliding_window=64)],
            r"sliding-window layers \(sliding_window = 64\)",
        ),
        (
            [FullAttentionSpec.merge([spec(), spec(sliding_window=64)])],
            r"sliding-window layers \(sliding_window = 64\)",
        ),
        ([spec(SlidingWindowSpec, sliding_window=64)], "a cache of kind SlidingWindowSpec"),
        ([spec(sliding_window=64)], r"sliding-window layers \(sliding_window = 64\)"),
        ([spec(attention_chunk_size=64)], "chunked attention"),
        ([spec(non_causal=True)], "both directions"),
        ([spec(kv_quant_mode=KVQuantMode.NVFP4)], "NVFP4"),
        ([spec(tokens_per_state=4)], "a compressed cache"),
        ([spec(num_head_slots=1)], "packed heads"),
        ([spec(state_content_bytes=64)], "packed keys and values"),
    ],
)
def test_groups_of_other_kinds_are_refused(specs: list[Any], word: str) -> None:
    with pytest.raises(UnsupportedModelError, match=word):
        refuse_groups(cache_config(*specs))


def scheduler(**more: Any) -> Any:
    manager = SimpleNamespace(block_size=32)
    usual = {"ec_connector": None, "hash_block_size": 32}
    caches = SimpleNamespace(
        coordinator=SimpleNamespace(single_type_managers=[manager]),
        block_pool=SimpleNamespace(enable_caching=True),
        kv_cache_config=cache_config(spec()),
    )
    return SimpleNamespace(kv_cache_manager=caches, **{**usual, **more})


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"ec_connector": object()}, "an encoder-cache connector"),
        ({"hash_block_size": 16}, "hashes of 16 tokens in blocks of 32"),
    ],
)
def test_schedulers_that_free_otherwise_are_refused(more: dict[str, Any], word: str) -> None:
    refuse_scheduler(scheduler())
    with pytest.raises(InvalidArgumentError, match=word):
        refuse_scheduler(scheduler(**more))


def layer(backend: str = "FLASH_ATTN", **more: Any) -> Any:
    usual = {
        "attn_backend": SimpleNamespace(get_name=lambda: backend, supported_kv_cache_dtypes=["auto"]),
        "attn_type": "decoder",
        "kv_cache_dtype": "auto",
        "impl": SimpleNamespace(alibi_slopes=None),
        "sliding_window": None,
        "kv_sharing_target_layer_name": None,
        "head_size": 64,
        "head_size_v": 64,
        "num_kv_heads": 2,
    }
    return SimpleNamespace(**{**usual, **more})


@pytest.mark.parametrize(
    ("second", "word"),
    [
        (layer("FLEX_ATTENTION"), "attention backend FLEX_ATTENTION in second"),
        (layer(kv_cache_dtype="int8_per_token_head"), "int8_per_token_head of FLASH_ATTN in second"),
        (layer(attn_type="encoder_only"), "type 'encoder_only'"),
        (layer(impl=SimpleNamespace(alibi_slopes=torch.ones(2))), "ALiBi in second"),
        (layer(sliding_window=64), "a sliding window of 64 tokens in second"),
        (layer(kv_sharing_target_layer_name="first"), "shared with another layer"),
        (layer(kv_cache_update_bypass=True), "a fused write to the cache in second"),
        (layer(head_size_v=32), "unequal size"),
        (layer(num_kv_heads=4), r"\[\(2, 64\), \(4, 64\)\]"),
    ],
)
def test_layers_that_attend_otherwise_are_refused(second: Any, word: str) -> None:
    refuse_layers({"first": layer(), "other": layer("TRITON_ATTN")})
    with pytest.raises((InvalidArgumentError, UnsupportedModelError), match=word):
        refuse_layers({"first": layer(), "second": second})


def test_a_model_without_attention_layers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="no attention layer"):
        refuse_layers({})
