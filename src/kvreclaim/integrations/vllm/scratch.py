"""Device memory that a pass needs for a moment: what has to stay free beside the pool."""

from __future__ import annotations

from kvreclaim.integrations.vllm.cells.heads import MAX_ENTRIES
from kvreclaim.integrations.vllm.cells.passes import MAX_BYTES
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.scoring import MAX_LOGITS

SAFETY = 1.25
"""Over the sum below: the allocator's rounding."""
MAX_OFFSETS = 17
"""Most offsets of any policy's usual options: 2^0 to 2^16."""


def scratch_bytes(
    *, num_layers: int, num_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int
) -> int:
    """Bytes that compressing num_tokens live tokens takes at its peak, beside the cache, on one worker.

    Scoring a layer: three copies of a batch of logits; keys, values and the keys' squares in fp32. Choosing:
    the scores of all layers, once more without the protected tokens, their order and indices. Moving is less.
    """
    logits = max(MAX_LOGITS, num_heads * MAX_OFFSETS * num_tokens)
    layer = 4 * num_kv_heads * num_tokens * head_dim
    scores = num_layers * num_kv_heads * num_tokens
    return int(SAFETY * (3 * 4 * logits + 4 * layer + 40 * scores))


def cells_bytes(
    *, num_layers: int, num_kv_heads: int, num_tokens: int, block_size: int, num_rows: int
) -> int:
    """Bytes of the tables of unequal heads, on one worker: of a step and of the requests, a pass's move and
    what making them takes for a moment.

    num_tokens: of a head at most; num_rows: requests at once
    """
    entries = num_layers * num_kv_heads * num_rows * blocks_for(num_tokens, block_size)
    return 2 * 4 * entries + 24 * MAX_ENTRIES + 4 * MAX_BYTES
