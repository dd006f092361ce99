"""The ops in plain PyTorch, vectorised over sequences and heads: oracle and fallback of every kernel."""

from kvreclaim.ops.reference.attention import causal_attention, column_sums, paged_attention
from kvreclaim.ops.reference.moves import (
    compact,
    compact_layer,
    copy_blocks,
    keep_open,
    prepare_blocks,
    write_kv,
)
from kvreclaim.ops.reference.rows import allocate, gather_slots, gather_tokens
from kvreclaim.ops.reference.scores import (
    key_norms,
    mixture_scores,
    select_top,
    trig_norm_scores,
    value_norms,
)

NAME = "reference"

__all__ = [
    "NAME",
    "allocate",
    "causal_attention",
    "column_sums",
    "compact",
    "compact_layer",
    "copy_blocks",
    "gather_slots",
    "gather_tokens",
    "keep_open",
    "key_norms",
    "mixture_scores",
    "paged_attention",
    "prepare_blocks",
    "select_top",
    "trig_norm_scores",
    "value_norms",
    "write_kv",
]
