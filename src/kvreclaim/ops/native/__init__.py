"""The ops as C++ kernels for CPUs (csrc/). Importing never fails: see unavailable_reason()."""

from kvreclaim.ops.native.attention import column_sums, paged_attention
from kvreclaim.ops.native.extension import describe, force_isa, supported_isas, unavailable_reason
from kvreclaim.ops.native.scoring import key_norms, mixture_scores, trig_norm_scores, value_norms
from kvreclaim.ops.native.selection import select_top
from kvreclaim.ops.native.storage import (
    allocate,
    compact,
    copy_blocks,
    gather_tokens,
    keep_open,
    prepare_blocks,
    unsupported_reason,
    write_kv,
)

NAME = "native"

__all__ = [
    "NAME",
    "allocate",
    "column_sums",
    "compact",
    "copy_blocks",
    "describe",
    "force_isa",
    "gather_tokens",
    "keep_open",
    "key_norms",
    "mixture_scores",
    "paged_attention",
    "prepare_blocks",
    "select_top",
    "supported_isas",
    "trig_norm_scores",
    "unavailable_reason",
    "unsupported_reason",
    "value_norms",
    "write_kv",
]
