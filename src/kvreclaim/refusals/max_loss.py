"""Settings of an engine and a request that the loss curve of max_loss covers.

Every engine option and every field of a request is in one of two tables. `*_FREE` change no answer beyond
rounding, or which tokens are sampled but not what the cache holds. `*_MEASURED`, and `measured` of a
feature (engine/feature.py), change what compression loses; the curve is measured under the listed values,
and max_loss refuses any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreclaim.errors import InvalidArgumentError

ENGINE_MEASURED: Mapping[str, tuple[Any, ...]] = {
    "spread_compression": (True,),
    "conversation_snapshots": (False,),
    "quantized_activations": ("auto",),
    "hf_overrides": (None,),
    "kv_cache_dtype_skip_layers": ((),),
    "sparse_prefill": ("dense",),
}
ENGINE_CHECKED = frozenset({"kv_cache_dtype", "max_num_batched_tokens"})
"""Compared with the curve or the model itself (Compressors)."""
ENGINE_FREE = frozenset(
    {
        "block_size",  # budgets are rounded up to whole blocks
        "num_blocks",
        "max_num_seqs",
        "max_model_len",
        "disable_hybrid_kv_cache_manager",
        "enable_prefix_caching",
        "state_checkpoints",
        "state_checkpoint_interval",
        "state_drafts",
        "kv_memory_fraction",
        "max_signal_bytes",
        "seed",
        "scheduling_policy",
        "eviction_policy",
        "prefix_snapshot_fraction",
        "max_pinned_fraction",
        "kv_cache_metrics_sample",
        "kernels",
        "threads",
        "cache_packed_weights",
        "kv_offloading_size",
        "full_cache_host_size",
        "preemption_mode",
        "swap_space",
        "kv_offloading_state_fraction",
        "preemption_victim",
        "kv_offloading_write_policy",
        "kv_offload_decode",
        "kv_offloading_disk_path",
        "kv_offloading_disk_size",
        "kv_load_policy",
        "kv_load_timeout",
        "kv_offloading_disk_write_policy",
        "kv_offloading_eviction_policy",
        "kv_recall_size",
        "speculative_config",
        "batch_invariant",  # excludes compression
        "enforce_eager",
    }
)
REQUEST_CHECKED = frozenset({"compression", "compress_prompt_at"})
"""compression: CompressionConfig checks it. compress_prompt_at: only before as much text as was measured."""
REQUEST_FREE = frozenset(
    {
        "request_id",
        "prompt_token_ids",
        "params",
        "prompt",
        "continuation",
        "priority",
        "retention",
        "tenant",
        "is_rewritten",  # matters to snapshots alone, which are off
        "drop_at",  # matters with drop_spans alone, of which there are none
        "cache_salt",
        "options",  # RequestFeature.measured names the fields that matter
        "may_end_early",
    }
)
REMEDY = "or give a budget instead of max_loss"


def refuse_unmeasured(max_loss: float, given: object, measured: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse settings under which the loss was not measured. Raises: InvalidArgumentError."""
    for name, values in measured.items():
        value = getattr(given, name)
        if value not in values:
            raise InvalidArgumentError(
                f"max_loss is {max_loss}, but losses are measured with {name} {values[0]!r}, and it is "
                f"{value!r:.60}; leave {name} out, {REMEDY}.",
                field=name,
            )


def refuse_chunk(max_loss: float, chunk: int, measured: int) -> None:
    """Refuse smaller prompt chunks than the loss was measured with. Raises: InvalidArgumentError."""
    if chunk < measured:
        raise InvalidArgumentError(
            f"max_loss is {max_loss}, but losses are measured with prompts computed {measured} tokens at a "
            f"time, and max_num_batched_tokens is {chunk}; raise it to {measured}, {REMEDY}.",
            field="max_num_batched_tokens",
        )


def refuse_tail(max_loss: float, at: int, num_prompt: int, measured: int) -> None:
    """Refuse a longer text after a compressed prefix than was measured. Raises: InvalidArgumentError."""
    if num_prompt - at > measured:
        raise InvalidArgumentError(
            f"max_loss is {max_loss}, but losses are measured on {measured} tokens behind a compressed text, "
            f"and {num_prompt - at} tokens of the prompt follow compress_prompt_at {at}; leave "
            f"compress_prompt_at out, {REMEDY}.",
            field="compress_prompt_at",
        )
