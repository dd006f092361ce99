"""The ops as Triton kernels for GPUs, and for Triton's interpreter on a CPU.

Importing it never fails: without triton it has only unavailable_reason(), unsupported_reason() and
describe(). ops/reference/ says what each function does; select_top is its sort, which a GPU does well,
and column_sums its PyTorch, a second pass over the keys for policies that ask for attention mass.
"""

import importlib.util

from kvreclaim.ops.reference import allocate, column_sums, keep_open, select_top
from kvreclaim.ops.triton.support import describe, unavailable_reason, unsupported_reason

if importlib.util.find_spec("triton") is not None:
    from kvreclaim.ops.triton.attention import decode_attention, paged_attention
    from kvreclaim.ops.triton.compaction import compact
    from kvreclaim.ops.triton.plan import static_tables
    from kvreclaim.ops.triton.scoring import key_norms, mixture_scores, trig_norm_scores, value_norms
    from kvreclaim.ops.triton.writes import copy_blocks, gather_tokens, prepare_blocks, write_kv

NAME = "triton"

__all__ = [
    "NAME",
    "allocate",
    "column_sums",
    "compact",
    "copy_blocks",
    "decode_attention",
    "describe",
    "gather_tokens",
    "keep_open",
    "key_norms",
    "mixture_scores",
    "paged_attention",
    "prepare_blocks",
    "select_top",
    "static_tables",
    "trig_norm_scores",
    "unavailable_reason",
    "unsupported_reason",
    "value_norms",
    "write_kv",
]
