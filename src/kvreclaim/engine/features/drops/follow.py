"""Update positions and signals after a sequence has dropped blocks."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.compression.policy import Signal
from kvreclaim.engine.attend.cell_tables import head_lengths
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.request.request import Sequence
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.schedule.budget.drops import Drop


@torch.inference_mode()
def follow_drop(context: PassContext, seq: Sequence, done: Drop) -> None:
    """Update positions and signals of a sequence after its table has dropped entries."""
    size, device, compressor = context.cache.block_size, context.cache.device, seq.request.compressor
    seq.cell_cache = None
    stays = torch.ones(done.num_tokens, dtype=torch.bool)
    for entry in done.entries:
        stays[entry * size : (entry + 1) * size] = False
    kept = stays.nonzero()[:, 0].to(device)
    needs_positions = compressor is not None and Signal.POSITIONS in compressor.policy.needs
    if compressor is not None and compressor.eviction_method.uneven:
        if needs_positions:
            _follow_heads(context, seq, stays, done.num_tokens)
    elif needs_positions or any(layer.softmax.window is not None for layer in context.facts.layers):
        seq.state.slot_positions = context.signals.positions(seq, done.num_tokens)[..., kept]
    context.signals.compacted(seq, kept[None, None])


def _follow_heads(context: PassContext, seq: Sequence, stays: Tensor, num_tokens: int) -> None:
    """Update positions by head. Tokens since the last pass, which include the dropped ones, are shared."""
    state, cache, end = seq.state, context.cache, seq.num_computed
    lengths = head_lengths(state.cells, num_tokens, cache)
    before = state.head_positions
    if before is None:
        before = HeadRows.empty(lengths.shape, torch.int32, cache.device)
    new = lengths - before.counts
    num_new = int(new.max())
    positions = torch.arange(end - num_new, end, dtype=torch.int32)[stays[num_tokens - num_new :]]
    counts = new - num_new + len(positions)
    state.head_positions = before.append(positions.to(cache.device), len(positions) - counts, counts)
