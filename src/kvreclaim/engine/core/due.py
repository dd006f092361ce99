"""When a sequence is compressed.

The points depend on the sequence's own lengths alone, not on what else is in the batch, unless a pass has to
be postponed: then it lacks blocks because others hold shared ones in a full pool. A preempted request that
is computed again therefore makes the same choices again.

A policy that compresses the prompt only (prompt_only) has one such point, the end of a prompt longer than
the budget. Nothing is evicted before, so the whole prompt must fit, and nothing after, so the sequence grows
by all that is generated. A policy that reads sparsely has none; its sequences are cut where that begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvreclaim.compression import Compressor
from kvreclaim.schedule.way import Way

if TYPE_CHECKING:
    from kvreclaim.engine.core.request import Sequence


def prompt_cap(compressor: Compressor, max_chunk: int) -> int:
    """Live tokens at which a sequence is compressed between two chunks of its prompt."""
    return compressor.budget + max(compressor.interval, max_chunk)


def decode_cap(compressor: Compressor) -> int:
    """Live tokens at which a sequence is compressed once its prompt is computed."""
    return compressor.budget + compressor.interval


def first_compaction(compressor: Compressor, num_prompt: int, max_chunk: int) -> int | None:
    """Logical length at which a sequence is compressed for the first time; None: it never is."""
    if compressor.prompt_only:
        return num_prompt if num_prompt > compressor.budget else None
    return min(prompt_cap(compressor, max_chunk), max(num_prompt, decode_cap(compressor)))


def tokens_until_compaction(seq: Sequence, max_chunk: int) -> int:
    """Most tokens that may be computed in one go before the next pass is considered."""
    compressor = seq.request.compressor
    prompt_left = seq.num_prompt - seq.num_computed
    if compressor is not None and compressor.way is Way.READS:
        whole = max(seq.num_prompt, compressor.budget) - seq.num_computed
        return whole if whole > 0 else max_chunk
    if compressor is None or not compressor.way.evicts:
        return max_chunk
    if compressor.prompt_only:
        return prompt_left if prompt_left > 0 else max_chunk
    if prompt_left > 0:
        return min(prompt_left, max(1, prompt_cap(compressor, max_chunk) - seq.num_live))
    return max(1, decode_cap(compressor) - seq.num_live)


def is_due(seq: Sequence, max_chunk: int) -> bool:
    """Whether the sequence is compressed at its present length."""
    compressor = seq.request.compressor
    if compressor is None or not compressor.way.evicts:
        return False
    in_prompt = seq.num_computed < seq.num_prompt
    if compressor.prompt_only:
        return not in_prompt and seq.num_prompt > compressor.budget and seq.state.last_computed == 0
    return seq.num_live >= (prompt_cap(compressor, max_chunk) if in_prompt else decode_cap(compressor))
