"""Configurations that compression inside vLLM refuses, checked in the front end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvreclaim.integrations.vllm.refusals.connector_refusals import ROWS as CONNECTOR_ROWS
from kvreclaim.integrations.vllm.refusals.refusals import (
    CACHE_DTYPES,
    DISTANCES,
    OTHER_MODEL,
    SLOT_DTYPES,
    WINDOW,
    ConfigRefusal,
    other_model,
)
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.groups import layer_kinds
from kvreclaim.integrations.vllm.settings.speculation import BY_TOKENS, WITH_LAYERS


def greater(path: str, option: str, limit: int = 1) -> Callable[[Any], str | None]:
    """Find an option that is over the limit."""

    def find(config: Any) -> str | None:
        value = _get(config, path)
        return f"{option} = {value}" if value > limit else None

    return find


def present(path: str, words: str) -> Callable[[Any], str | None]:
    """Find an option that is set."""
    return lambda config: words if _get(config, path) not in (None, False, 0) else None


def newer(section: str, name: str, words: str) -> Callable[[Any], str | None]:
    """An option that not every version has."""
    return lambda config: words if getattr(_get(config, section), name, False) else None


def _get(config: Any, path: str) -> Any:
    for name in path.split("."):
        config = getattr(config, name)
    return config


def _runner(config: Any) -> str | None:
    runner = config.model_config.runner_type
    return f"the runner type {runner!r}" if runner != "generate" else None


def cache_dtype(*those: str) -> Callable[[Any], str | None]:
    """Find one of these --kv-cache-dtypes."""

    def find(config: Any) -> str | None:
        dtype = config.cache_config.cache_dtype
        return f"--kv-cache-dtype {dtype}" if dtype in those else None

    return find


def _unknown_dtype(config: Any) -> str | None:
    """Find a dtype that is not known in this version."""
    dtype = config.cache_config.cache_dtype
    known = dtype in CACHE_DTYPES and (dtype not in SLOT_DTYPES or family.find_family().slots)
    return None if known else f"--kv-cache-dtype {dtype} in this version of vLLM"


def _windows(config: Any) -> str | None:
    model = config.model_config
    window = model.get_sliding_window()
    if config.cache_config.sliding_window is not None:
        return f"sliding-window layers (all, with a window of {window} tokens)"
    return None


def _hybrid(config: Any) -> str | None:
    unnamed = config.model_config.is_hybrid and layer_kinds(config.model_config) is None
    return "a hybrid model whose configuration names no layer_types" if unnamed else None


def _dual_chunk(config: Any) -> str | None:
    found = hasattr(config.model_config.hf_config, "dual_chunk_attention_config")
    return "dual-chunk attention" if found else None


def _drafter(config: Any) -> str | None:
    speculative = config.speculative_config
    if speculative is None or speculative.method in _drafters():
        return None
    return f"method {speculative.method!r} of --speculative-config"


def _drafters() -> tuple[str, ...]:
    """Methods of speculative decoding that go with compression in this version."""
    return BY_TOKENS if family.find_family().drafter is None else BY_TOKENS + WITH_LAYERS


def _drafting(config: Any) -> str | None:
    speculative = config.speculative_config
    names = ("parallel_drafting", "use_heterogeneous_vocab", "disable_padded_drafter_batch")
    found = [name for name in names if getattr(speculative, name, False)]
    return f"{found[0]} in --speculative-config" if found else None


def _drafts_in_v2(config: Any) -> str | None:
    found = config.speculative_config is not None and config.use_v2_model_runner
    return "--speculative-config in the V2 model runner" if found else None


def _drafts_beside_connector(config: Any) -> str | None:
    if config.speculative_config is None or config.kv_transfer_config is None:
        return None
    return "--speculative-config beside a KV connector (--kv-offloading-size, --kv-transfer-config)"


UNTESTED = "it is not tested"
DTYPES = f"use one of {', '.join(CACHE_DTYPES)}"
_SPLIT = "a compressed request's tokens are no longer where their positions say, which the split goes by"
CONFIG: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        _drafter,
        "its drafter counts cache slots by positions, which compression changes, or it is not tested",
        f"use {' or '.join(BY_TOKENS)}, or with vLLM 0.32 {' or '.join(WITH_LAYERS)}",
    ),
    ConfigRefusal(_drafting, UNTESTED),
    ConfigRefusal(
        _drafts_in_v2,
        "it has drafters of its own, which are not tested",
        "use VLLM_USE_V2_MODEL_RUNNER=0, or remove --speculative-config",
    ),
    ConfigRefusal(
        greater("parallel_config.pipeline_parallel_size", "--pipeline-parallel-size"),
        "several batches are in flight on different stages, which is not tested",
        "use --tensor-parallel-size",
    ),
    ConfigRefusal(
        greater("parallel_config.decode_context_parallel_size", "--decode-context-parallel-size"),
        _SPLIT,
        "set it to 1",
    ),
    ConfigRefusal(
        greater("parallel_config.prefill_context_parallel_size", "--prefill-context-parallel-size"),
        _SPLIT,
        "set it to 1",
    ),
    ConfigRefusal(
        present("parallel_config.use_ubatching", "dual-batch overlap (--enable-dbo, --ubatch-size)"),
        "half-batches take their lengths past us",
    ),
    ConfigRefusal(
        present("parallel_config.enable_elastic_ep", "elastic expert parallelism (--enable-elastic-ep)"),
        "workers come and go without the state of compressed requests",
    ),
    ConfigRefusal(
        _drafts_beside_connector,
        "drafts of a request that is hidden from the connector are not tested",
        "remove one of them",
    ),
    *CONNECTOR_ROWS,
    ConfigRefusal(
        present("ec_transfer_config", "an encoder-cache connector (--ec-transfer-config)"), UNTESTED
    ),
    ConfigRefusal(
        present("aux_output_config.enabled", "returned routed experts (--enable-return-routed-experts)"),
        "they are stored by prefix, and depend on what a compressed request can still see",
    ),
    ConfigRefusal(
        present("attention_config.hisparse_config", "HiSparse (--attention-config)"),
        "it keeps the cache in host memory, out of our reach",
    ),
    ConfigRefusal(
        newer("kernel_config", "monokernel", "MonoKernels (--monokernel)"),
        "they attend within one kernel for a whole layer, past the layers that we know",
    ),
    ConfigRefusal(
        present("cache_config.kv_sharing_fast_prefill", "--kv-sharing-fast-prefill"),
        "layers that share a cache would be compressed twice",
    ),
    ConfigRefusal(
        cache_dtype("nvfp4", "nvfp4_4over6"),
        "a block keeps the scales of all its tokens together, in an order that the GPU's kernel chooses",
        DTYPES,
    ),
    ConfigRefusal(
        cache_dtype("fp8_ds_mla", "nvfp4_ds_mla"),
        "a slot holds the latent of MLA instead of keys and values per head",
        DTYPES,
    ),
    ConfigRefusal(_unknown_dtype, UNTESTED, DTYPES),
    other_model(_runner, "only generation keeps a cache that grows", "use --runner generate"),
    other_model(
        present("model_config.is_encoder_decoder", "an encoder-decoder model"),
        "cross attention has a cache of another kind",
        "take a decoder-only model",
    ),
    other_model(
        present("model_config.is_attention_free", "a model without attention (Mamba)"),
        "its state does not grow, there is nothing to compress",
    ),
    other_model(
        _hybrid,
        "how many layers have attention, and how many a recurrent state, is known from these",
    ),
    other_model(
        present("model_config.use_mla", "multi-head latent attention (MLA)"),
        "its cache holds one latent per token instead of keys and values per head",
    ),
    other_model(
        present("model_config.is_diffusion", "a diffusion language model"),
        "it rewrites tokens that it has generated",
    ),
    other_model(
        present("model_config.is_mm_prefix_lm", "attention in both directions over multimodal prefixes"),
        "the range is given by positions in the cache",
    ),
    other_model(
        present(
            "model_config.rswa_window", "a model with sliding-window layers that keep their start (R-SWA)"
        ),
        WINDOW,
    ),
    other_model(present("model_config.uses_alibi", "ALiBi"), DISTANCES),
    other_model(_dual_chunk, DISTANCES),
    other_model(
        _windows, WINDOW, f"{OTHER_MODEL} (or try --disable-sliding-window, which also shortens the context)"
    ),
)


def refuse_config(vllm_config: Any) -> None:
    """Raises: InvalidArgumentError, UnsupportedModelError with the first reason found."""
    for row in CONFIG:
        row.check(vllm_config)
