"""vLLM's cache groups: the one of full attention is compressed, those of sliding windows or recurrent layers
stay vLLM's own."""

from __future__ import annotations

from typing import Any, NamedTuple

from kvreclaim.memory.blocks import blocks_for

IN_FLIGHT = 2
"""Steps, or tokens of a request that decodes, that the asynchronous scheduler has under way."""
ATTENTION = ("attention", "full_attention", "hybrid")
STATELESS = ("attention", "full_attention", "mlp", "moe")
"""Kinds of layers, in the words of configurations; hybrid ones have attention and a state."""


class LayerKinds(NamedTuple):
    """Layers of a model with two kinds.

    full:   with full attention
    others: with a sliding window or a recurrent state
    window: of the sliding ones, tokens; None: they are recurrent
    """

    full: int
    others: int
    window: int | None

    @property
    def words(self) -> str:
        return "recurrent layers" if self.window is None else "sliding windows"


def layer_kinds(model_config: Any) -> LayerKinds | None:
    """Kinds of layers by the model's configuration; None unless some have full attention and all others one
    sliding window, or a recurrent state."""
    text = model_config.hf_text_config
    kinds = getattr(text, "layers_block_type", None) or getattr(text, "layer_types", None) or ()
    if model_config.is_hybrid:
        full, others = sum(kind in ATTENTION for kind in kinds), sum(kind not in STATELESS for kind in kinds)
        return LayerKinds(full, others, None) if full and others else None
    full, sliding = (kinds.count(kind) for kind in ("full_attention", "sliding_attention"))
    window = model_config.get_sliding_window()
    if not full or not sliding or full + sliding != len(kinds) or window is None:
        return None
    return LayerKinds(full, sliding, window)


def layer_specs(spec: Any) -> tuple[Any, ...]:
    """A group's spec, or those of its layers where they differ (in KV dtype, for example)."""
    return tuple(getattr(spec, "kv_cache_specs", {"": spec}).values())


def is_full(spec: Any) -> bool:
    """Return whether all layers of a group have full attention."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return all(isinstance(one, FullAttentionSpec) for one in layer_specs(spec))


def is_recurrent(spec: Any) -> bool:
    """Return whether the layers of a group have a recurrent state."""
    from vllm.v1.kv_cache_interface import MambaSpec

    return type(spec) is MambaSpec


def has_states(kv_cache_config: Any) -> bool:
    """Return whether some group has a recurrent state."""
    return any(is_recurrent(group.kv_cache_spec) for group in kv_cache_config.kv_cache_groups)


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


def state_blocks(aligned: bool, num_checkpoints: int, in_flight: int = 1) -> int:
    """Blocks that a request holds in one group of recurrent state at most, however long it is.

    aligned:         vLLM keeps states at ends of blocks for others (mamba_cache_mode align): a step reads one
                     block and writes the next
    num_checkpoints: blocks for a state within the last chunk of a prompt
    in_flight:       steps with blocks that are not freed yet
    """
    return 1 + in_flight + num_checkpoints if aligned else 1


def most_other_blocks(vllm_config: Any) -> int:
    """Blocks that one request holds in all other groups at most; known without vLLM's groups.

    vLLM fills groups of one size, the last of a kind partly. One holds all layers with full attention, which
    refuse_groups checks, so the size is at least their number.
    """
    kinds = layer_kinds(vllm_config.model_config)
    if kinds is None:
        return 0
    cache = vllm_config.cache_config
    if kinds.window is None:
        each = state_blocks(cache.mamba_cache_mode == "align", num_checkpoints=1, in_flight=IN_FLIGHT)
    else:
        each = window_blocks(kinds.window, cache.block_size, vllm_config.max_in_flight_tokens)
    return blocks_for(kinds.others, kinds.full) * each
