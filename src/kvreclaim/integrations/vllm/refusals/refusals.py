"""Refusals of compression inside vLLM, each with its reason, at start.

A row of a table looks at one thing and returns what it found that is refused, or None. The front end
checks the configuration (config_refusals), the engine core groups and scheduler, a worker its layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.integrations.vllm.settings.enabled import KEY
from kvreclaim.integrations.vllm.settings.groups import full_group, is_full, is_recurrent, layer_specs

SLOT_DTYPES = (
    *("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"),
    *("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc"),
)
"""A slot has a token's key and value with their own scales."""
CACHE_DTYPES = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", *SLOT_DTYPES)
BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "TURBOQUANT")
SLOT_MODES = tuple(name.upper() for name in SLOT_DTYPES)
QUANT_MODES = ("NONE", "FP8_PER_TENSOR", *SLOT_MODES)
ELSE = f"or leave {KEY} out"
OTHER_MODEL = "take a model with ordinary attention in every layer"
WINDOW = "the window is counted in cache slots, which compression changes"
DISTANCES = "it takes distances from the place in the cache, which compression changes"


@dataclass(frozen=True, slots=True)
class ConfigRefusal:
    """find: what is there that is refused, or None. why and remedy: the rest of the message."""

    find: Callable[[Any], str | None]
    why: str
    remedy: str = "remove it"
    error: type[Exception] = InvalidArgumentError

    def check(self, subject: object, where: str = "", option: str = KEY) -> None:
        """Raises: self.error."""
        found = self.find(subject)
        if found:
            raise self.error(
                f"{option} does not work with {found}{where}: {self.why}; "
                f"{self.remedy}, or leave {option} out."
            )


def other_model(find: Callable[[Any], str | None], why: str, remedy: str = OTHER_MODEL) -> ConfigRefusal:
    """A refusal of what the model itself is."""
    return ConfigRefusal(find, why, remedy, UnsupportedModelError)


def kv_connector(config: Any) -> str | None:
    """Any KV connector, for what goes with none."""
    return "a KV connector, such as --kv-offloading-size" if config.kv_transfer_config is not None else None


def refuse_groups(kv_cache_config: Any) -> None:
    """Check a KVCacheConfig: one group of ordinary full attention, beside sliding windows or recurrent state.

    Raises: UnsupportedModelError.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    full = [spec for spec in specs if is_full(spec)]
    windows = [spec for spec in specs if type(spec) is SlidingWindowSpec]
    states = [spec for spec in specs if is_recurrent(spec)]
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
    for spec in layer_specs(full[0] if full else specs[0]):
        for row in GROUP:
            row.check(spec)
    precisions = {(one.dtype, one.kv_quant_mode) for spec in (*full, *windows) for one in layer_specs(spec)}
    if others and len(precisions) > 1:
        raise UnsupportedModelError(
            "kv_compression does not work with several groups of layers in several precisions: it is not "
            f"tested; use one --kv-cache-dtype for all layers, {ELSE}."
        )


def _spec_kind(spec: Any) -> str | None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return f"a cache of kind {type(spec).__name__}" if type(spec) is not FullAttentionSpec else None


def _field(name: str, words: str, usual: object = None) -> Callable[[Any], str | None]:
    def find(spec: Any) -> str | None:
        value = getattr(spec, name)
        return f"{words} ({name} = {value})" if value != usual else None

    return find


def _quant_mode(spec: Any) -> str | None:
    mode = spec.kv_quant_mode.name
    return f"the cache quantisation {mode}" if mode not in QUANT_MODES else None


def _content(spec: Any) -> str | None:
    known = spec.state_content_bytes is None or spec.kv_quant_mode.name in SLOT_MODES
    return None if known else f"packed keys and values (state_content_bytes = {spec.state_content_bytes})"


_PACKED = "keys and values do not lie token by token"
GROUP: tuple[ConfigRefusal, ...] = (
    other_model(_spec_kind, "only full attention keeps a slot per token"),
    other_model(_field("sliding_window", "sliding-window layers"), WINDOW),
    other_model(_field("attention_chunk_size", "chunked attention"), WINDOW),
    other_model(_field("non_causal", "attention in both directions", False), "tokens depend on later ones"),
    other_model(_quant_mode, _PACKED, f"use one of {', '.join(CACHE_DTYPES)}"),
    other_model(_field("tokens_per_state", "a compressed cache", 1), _PACKED),
    other_model(_field("num_head_slots", "packed heads"), _PACKED),
    other_model(_content, _PACKED),
)


def refuse_scheduler(scheduler: Any) -> None:
    """Check a Scheduler that is ready: hashes are per block.

    Raises: InvalidArgumentError.
    """
    caches = scheduler.kv_cache_manager
    manager = caches.coordinator.single_type_managers[full_group(caches.kv_cache_config)]
    found = {
        "an encoder-cache connector": scheduler.ec_connector is not None,
        f"prefix hashes of {scheduler.hash_block_size} tokens in blocks of {manager.block_size}": (
            caches.block_pool.enable_caching and scheduler.hash_block_size != manager.block_size
        ),
    }
    for what, holds in found.items():
        if holds:
            raise InvalidArgumentError(
                f"kv_compression does not work with {what}: a block must be hashed whole and belong to the "
                f"KV cache alone; remove the option that asks for it, {ELSE}."
            )


def _backend(layer: Any) -> str | None:
    name = layer.attn_backend.get_name()
    return f"the attention backend {name}" if name not in BACKENDS else None


def _stored(layer: Any) -> str | None:
    dtype = layer.kv_cache_dtype
    known = dtype not in SLOT_DTYPES or dtype in layer.attn_backend.supported_kv_cache_dtypes
    return None if known else f"--kv-cache-dtype {dtype} of {layer.attn_backend.get_name()}"


def _attn_type(layer: Any) -> str | None:
    return f"attention of type {str(layer.attn_type)!r}" if layer.attn_type != "decoder" else None


LAYER: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        _backend,
        "the order of its cache is not known here",
        f"choose one of {', '.join(BACKENDS)} with --attention-backend",
    ),
    ConfigRefusal(
        _stored,
        "the back-end does not say that it stores it",
        "choose another --kv-cache-dtype or --attention-backend",
    ),
    other_model(_attn_type, "only a decoder's cache grows"),
    other_model(
        lambda layer: "ALiBi" if getattr(layer.impl, "alibi_slopes", None) is not None else None, DISTANCES
    ),
    other_model(
        lambda layer: f"a sliding window of {layer.sliding_window} tokens" if layer.sliding_window else None,
        WINDOW,
    ),
    other_model(
        lambda layer: "a cache shared with another layer" if layer.kv_sharing_target_layer_name else None,
        "it would be compressed twice",
    ),
    other_model(
        lambda layer: (
            "a fused write to the cache" if getattr(layer, "kv_cache_update_bypass", False) else None
        ),
        "the model stores keys and values itself, which is not tested",
    ),
    other_model(
        lambda layer: "keys and values of unequal size" if layer.head_size_v != layer.head_size else None,
        "the two halves of a slot are taken to be equal",
    ),
)


def refuse_layers(layers: Mapping[str, Any]) -> None:
    """Check the worker's attention layers by name. Raises: InvalidArgumentError, UnsupportedModelError."""
    if not layers:
        raise UnsupportedModelError(
            f"kv_compression found no attention layer in this model; {OTHER_MODEL}, {ELSE}."
        )
    for name, layer in layers.items():
        for row in LAYER:
            row.check(layer, f" in {name}")
    shapes = {(layer.num_kv_heads, layer.head_size) for layer in layers.values()}
    if len(shapes) > 1:
        raise UnsupportedModelError(
            "kv_compression needs layers with one number and size of KV heads; got (heads, size) "
            f"{sorted(shapes)}; {OTHER_MODEL}, {ELSE}."
        )
