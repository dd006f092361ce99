"""The ops as C++ kernels for CPUs (csrc/). Importing never fails: see unavailable_reason()."""

from kvreclaim.ops.extension import describe as describe
from kvreclaim.ops.extension import force_isa as force_isa
from kvreclaim.ops.extension import supported_isas as supported_isas
from kvreclaim.ops.extension import torch_alone as torch_alone
from kvreclaim.ops.extension import unavailable_reason as unavailable_reason
from kvreclaim.ops.native.scoring import mixture_scores as mixture_scores
from kvreclaim.ops.native.scoring import select_runs as select_runs
from kvreclaim.ops.native.scoring import select_top as select_top
from kvreclaim.ops.native.scoring import surrogate_scores as surrogate_scores
from kvreclaim.ops.native.scoring import token_norms as token_norms
from kvreclaim.ops.native.scoring import trig_norm_scores as trig_norm_scores
from kvreclaim.ops.native.storage import EXACT_QUERIES as EXACT_QUERIES
from kvreclaim.ops.native.storage import allocate as allocate
from kvreclaim.ops.native.storage import column_sums as column_sums
from kvreclaim.ops.native.storage import compact as compact
from kvreclaim.ops.native.storage import copy_blocks as copy_blocks
from kvreclaim.ops.native.storage import gather_tokens as gather_tokens
from kvreclaim.ops.native.storage import paged_attention as paged_attention
from kvreclaim.ops.native.storage import plain_view as plain_view
from kvreclaim.ops.native.storage import prepare_blocks as prepare_blocks
from kvreclaim.ops.native.storage import transform_rows as transform_rows
from kvreclaim.ops.native.storage import unsupported_reason as unsupported_reason
from kvreclaim.ops.native.storage import write_kv as write_kv

NAME = "native"
STACKS_LAYERS = False
