"""The ops as Triton kernels for GPUs, and for Triton's interpreter on a CPU.

Importing it never fails: without triton it has only unavailable_reason(), unsupported_reason() and
describe(). ops/reference/ documents each function; select_top is its sort, which a GPU does well,
and column_sums its PyTorch, a second pass over the keys for policies that need attention mass.
"""

import importlib.util

from kvreclaim.ops.key_transform import transform_rows as transform_rows
from kvreclaim.ops.reference import allocate as allocate
from kvreclaim.ops.reference import column_sums as column_sums
from kvreclaim.ops.reference import plain_view as plain_view
from kvreclaim.ops.reference import select_runs as select_runs
from kvreclaim.ops.reference import select_top as select_top
from kvreclaim.ops.triton.support import describe as describe
from kvreclaim.ops.triton.support import unavailable_reason as unavailable_reason
from kvreclaim.ops.triton.support import unsupported_reason as unsupported_reason

if importlib.util.find_spec("triton") is not None:
    from kvreclaim.ops.triton.attention import decode_attention as decode_attention
    from kvreclaim.ops.triton.attention import paged_attention as paged_attention
    from kvreclaim.ops.triton.plan import static_tables as static_tables
    from kvreclaim.ops.triton.scoring import mixture_scores as mixture_scores
    from kvreclaim.ops.triton.scoring import surrogate_scores as surrogate_scores
    from kvreclaim.ops.triton.scoring import token_norms as token_norms
    from kvreclaim.ops.triton.scoring import trig_norm_scores as trig_norm_scores
    from kvreclaim.ops.triton.writes import compact as compact
    from kvreclaim.ops.triton.writes import copy_blocks as copy_blocks
    from kvreclaim.ops.triton.writes import gather_tokens as gather_tokens
    from kvreclaim.ops.triton.writes import prepare_blocks as prepare_blocks
    from kvreclaim.ops.triton.writes import write_kv as write_kv

NAME = "triton"
STACKS_LAYERS = True
