"""vLLM's cache groups: the one of full attention is compressed, those of sliding windows stay vLLM's own."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvreclaim.memory.blocks import blocks_for


class LayerKinds(NamedTuple):
    """Layers of a model that has both kinds.

    window: of the sliding ones, tokens
    """

    full: int
    sliding: int
    window: int


def layer_kinds(model_config: Any) -> LayerKinds | None:
    """What the model's configuration says of its layers; None: not that some have full attention and all
    others one sliding window."""
    kinds = getattr(model_config.hf_text_config, "layer_types", None) or ()
    full, sliding = (kinds.count(kind) for kind in ("full_attention", "sliding_attention"))
    window = model_config.get_sliding_window()
    if not full or not sliding or full + sliding != len(kinds) or window is None:
        return None
    return LayerKinds(full, sliding, window)


def layer_specs(spec: Any) -> tuple[Any, ...]:
    """A group's spec, or those of its layers where they differ (in KV dtype, for example)."""
    return tuple(getattr(spec, "kv_cache_specs", {"": spec}).values())


def is_full(spec: Any) -> bool:
    """Whether all layers of a group have full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return all(isinstance(one, FullAttentionSpec) for one in layer_specs(spec))


def full_group(kv_cache_config: Any) -> int:
    """The index of the group that is compressed, of groups that refuse_groups has let through."""
    groups = kv_cache_config.kv_cache_groups
    return next(n for n, group in enumerate(groups) if is_full(group.kv_cache_spec))


def full_layers(kv_cache_config: Any) -> frozenset[str]:
    """Names of the layers that are compressed."""
    return frozenset(kv_cache_config.kv_cache_groups[full_group(kv_cache_config)].layer_names)


def window_blocks(window: int, block_size: int, in_flight: int) -> int:
    """Blocks that a request holds in one group of sliding windows at most, with so many tokens in flight: the
    window may begin inside a block."""
    return blocks_for(window - 1 + in_flight, block_size) + 1


def most_window_blocks(vllm_config: Any) -> int:
    """Blocks that one request holds in all groups of sliding windows at most; known without vLLM's groups.

    vLLM fills groups of one size, the last of a kind partly. One holds all layers with full attention, as
    refuse_groups wants it, so the size is at least their number.
    """
    kinds = layer_kinds(vllm_config.model_config)
    if kinds is None:
        return 0
    each = window_blocks(kinds.window, vllm_config.cache_config.block_size, vllm_config.max_in_flight_tokens)
    return blocks_for(kinds.sliding, kinds.full) * each
