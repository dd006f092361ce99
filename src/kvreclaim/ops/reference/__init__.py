"""The ops in plain PyTorch, vectorised over sequences and heads: oracle and fallback of every kernel."""

from kvreclaim.ops.key_transform import transform_rows as transform_rows
from kvreclaim.ops.reference.attention import causal_attention as causal_attention
from kvreclaim.ops.reference.attention import column_sums as column_sums
from kvreclaim.ops.reference.attention import paged_attention as paged_attention
from kvreclaim.ops.reference.rows import allocate as allocate
from kvreclaim.ops.reference.rows import compact as compact
from kvreclaim.ops.reference.rows import compact_layer as compact_layer
from kvreclaim.ops.reference.rows import copy_blocks as copy_blocks
from kvreclaim.ops.reference.rows import gather_slots as gather_slots
from kvreclaim.ops.reference.rows import gather_tokens as gather_tokens
from kvreclaim.ops.reference.rows import plain_view as plain_view
from kvreclaim.ops.reference.rows import prepare_blocks as prepare_blocks
from kvreclaim.ops.reference.rows import unsupported_reason as unsupported_reason
from kvreclaim.ops.reference.rows import write_kv as write_kv
from kvreclaim.ops.reference.scores import mixture_scores as mixture_scores
from kvreclaim.ops.reference.scores import select_runs as select_runs
from kvreclaim.ops.reference.scores import select_top as select_top
from kvreclaim.ops.reference.scores import surrogate_scores as surrogate_scores
from kvreclaim.ops.reference.scores import token_norms as token_norms
from kvreclaim.ops.reference.scores import trig_norm_scores as trig_norm_scores

NAME = "reference"
STACKS_LAYERS = False
