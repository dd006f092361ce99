"""Models and schedulers that compression inside vLLM refuses, checked once they are loaded.

The engine core checks groups of layers and its scheduler, a worker its layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.refusals import predicates as find
from kvreclaim.integrations.vllm.refusals.row import (
    ELSE,
    OTHER_MODEL,
    ConfigRefusal,
    model_rows,
    refuse,
    rows,
)
from kvreclaim.integrations.vllm.refusals.table import DISTANCES, UNTESTED, WINDOW
from kvreclaim.integrations.vllm.settings import groups

BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TURBOQUANT")
SLOT_MODES = tuple(name.upper() for name in find.SLOT_DTYPES)
QUANT_MODES = ("NONE", "FP8_PER_TENSOR", *SLOT_MODES)


def _spec_kind(spec: Any) -> str | None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return f"a cache of kind {type(spec).__name__}" if type(spec) is not FullAttentionSpec else None


def _field(name: str, words: str, usual: object = None) -> find.Predicate:
    return find.not_one_of(name, (usual,), f"{words} ({name} = {{}})")


def _content(spec: Any) -> str | None:
    known = spec.state_content_bytes is None or spec.kv_quant_mode.name in SLOT_MODES
    return None if known else f"packed keys and values (state_content_bytes = {spec.state_content_bytes})"


def _unequal_sizes(layer: Any) -> str | None:
    return "keys and values of unequal size" if layer.head_size_v != layer.head_size else None


def _backend(layer: Any) -> str | None:
    name = layer.attn_backend.get_name()
    return f"the attention backend {name}" if name not in BACKENDS else None


def _stored(layer: Any) -> str | None:
    dtype = layer.kv_cache_dtype
    known = dtype not in find.SLOT_DTYPES or dtype in layer.attn_backend.supported_kv_cache_dtypes
    return None if known else f"--kv-cache-dtype {dtype} of {layer.attn_backend.get_name()}"


def _unnamed(config: Any) -> str | None:
    named = groups.layer_kinds(config.model_config)
    return None if named else "groups that the model's layer_types do not name"


def _hashes(scheduler: Any) -> str | None:
    caches = scheduler.kv_cache_manager
    size = caches.coordinator.single_type_managers[groups.full_group(caches.kv_cache_config)].block_size
    unequal = caches.block_pool.enable_caching and scheduler.hash_block_size != size
    return f"prefix hashes of {scheduler.hash_block_size} tokens in blocks of {size}" if unequal else None


_PACKED = "keys and values do not lie token by token"
GROUP = model_rows(
    {
        _spec_kind: "only full attention keeps a slot per token",
        _field("sliding_window", "sliding-window layers"): WINDOW,
        _field("attention_chunk_size", "chunked attention"): WINDOW,
        _field("non_causal", "attention in both directions", False): "tokens depend on later ones",
        find.not_one_of("kv_quant_mode.name", QUANT_MODES, "the cache quantisation {}"): (
            f"{_PACKED}; use one of {', '.join(find.CACHE_DTYPES)}"
        ),
        _field("tokens_per_state", "a compressed cache", 1): _PACKED,
        _field("num_head_slots", "packed heads"): _PACKED,
        _content: _PACKED,
    }
)
PRECISIONS = ConfigRefusal(
    lambda several: "several groups of layers in several precisions" if several else None,
    UNTESTED,
    "use one --kv-cache-dtype for all layers",
    UnsupportedModelError,
)
UNNAMED_GROUPS = model_rows({_unnamed: "how many blocks a request needs is known from these"})
SCHEDULER = rows(
    dict.fromkeys(
        (find.present("ec_connector", "an encoder-cache connector"), _hashes),
        "a block must be hashed whole and belong to the KV cache alone",
    ),
    "remove that option",
)
LAYER = (
    *rows(
        {
            _backend: "the order of its cache is not known here; choose one of "
            f"{', '.join(BACKENDS)} with --attention-backend",
            _stored: "the back-end does not support it; choose another --kv-cache-dtype or "
            "--attention-backend",
        }
    ),
    *model_rows(
        {
            find.ATTENTION_TYPE: "only a decoder's cache grows",
            find.optional("impl.alibi_slopes", "ALiBi"): DISTANCES,
            find.present("sliding_window", "a sliding window of {} tokens"): WINDOW,
            find.SHARED_CACHE: "it would be compressed twice",
            find.FUSED_WRITE: "the model stores keys and values itself, which is not tested",
            _unequal_sizes: "the two halves of a slot are taken to be equal",
        }
    ),
)


def refuse_groups(kv_cache_config: Any) -> None:
    """Check a KVCacheConfig: one group of full attention, with sliding windows or recurrent state.

    Raises: UnsupportedModelError.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [spec for spec in specs if groups.is_full(spec)]
    windows = [spec for spec in specs if type(spec) is SlidingWindowSpec]
    states = [spec for spec in specs if groups.is_recurrent(spec)]
    others = len(specs) - 1
    if others and (len(full) != 1 or others not in (len(windows), len(states))):
        kinds = ", ".join(type(spec).__name__ for spec in specs) or "none"
        raise UnsupportedModelError(
            "kv_compression needs one group of layers with full attention, beside none, or groups of sliding "
            f"windows or of recurrent state; this model has {len(specs)} ({kinds}); {OTHER_MODEL}, {ELSE}."
        )
    sizes = sorted({spec.block_size for spec in (*full, *windows)})
    if len(sizes) > 1:
        raise UnsupportedModelError(
            "kv_compression needs groups of layers with one block size, in which it counts; this model has "
            f"{sizes}; {OTHER_MODEL}, {ELSE}."
        )
    for spec in groups.layer_specs(full[0] if full else specs[0]):
        refuse(GROUP, spec)
    precisions = {
        (one.dtype, one.kv_quant_mode) for spec in (*full, *windows) for one in groups.layer_specs(spec)
    }
    refuse((PRECISIONS,), others and len(precisions) > 1)


def refuse_unnamed_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    """Check that several groups are those that the front end has checked. Raises: UnsupportedModelError."""
    if len(kv_cache_config.kv_cache_groups) > 1:
        refuse(UNNAMED_GROUPS, vllm_config)


def refuse_scheduler(scheduler: Any) -> None:
    """Check a Scheduler that is ready: hashes are per block. Raises: InvalidArgumentError."""
    refuse(SCHEDULER, scheduler)


def refuse_layers(layers: Mapping[str, Any]) -> None:
    """Check the worker's attention layers by name. Raises: InvalidArgumentError, UnsupportedModelError."""
    if not layers:
        raise UnsupportedModelError(
            f"kv_compression found no attention layer in this model; {OTHER_MODEL}, {ELSE}."
        )
    for name, layer in layers.items():
        refuse(LAYER, layer, f" in {name}")
    shapes = {(layer.num_kv_heads, layer.head_size) for layer in layers.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            "kv_compression needs layers with one number and size of KV heads; got (heads, size) "
            f"{sorted(shapes)}; {OTHER_MODEL}, {ELSE}."
        )
