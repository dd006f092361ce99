"""Dropped spans: whole blocks have left a table, and what goes by slots follows."""

from __future__ import annotations

import torch
from torch import Tensor

from kvreclaim.compression.policy import Signal
from kvreclaim.engine.attend.cell_tables import head_lengths
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.request.request import Sequence
from kvreclaim.schedule.budget.drops import Drop


@torch.inference_mode()
def follow_drop(context: PassContext, seq: Sequence, done: Drop) -> None:
    """Positions and signals of a sequence whose table has dropped these entries."""
    size, device, compressor = context.cache.block_size, context.cache.device, seq.request.compressor
    seq.cell_cache = None
    stays = torch.ones(done.num_tokens, dtype=torch.bool)
    for entry in done.entries:
        stays[entry * size : (entry + 1) * size] = False
    kept = stays.nonzero()[:, 0].to(device)
    asked = compressor is not None and Signal.POSITIONS in compressor.policy.needs
    if compressor is not None and compressor.eviction_method.uneven:
        if asked:
            _follow_heads(context, seq, stays, done.num_tokens)
    elif asked or any(layer.softmax.window is not None for layer in context.facts.layers):
        layers = range(context.cache.num_layers)
        known = [context.signals.positions(seq, layer, done.num_tokens) for layer in layers]
        seq.state.slot_positions = torch.stack(known)[..., kept]
    context.signals.compacted(seq, kept[None, None])


def _follow_heads(context: PassContext, seq: Sequence, stays: Tensor, num_tokens: int) -> None:
    """Heads have other tokens of the last pass, and the same ones since, of which some have gone."""
    state, cache, end = seq.state, context.cache, seq.num_computed
    gone = (~stays).nonzero()[:, 0] - num_tokens  # counted from the end, where all heads are alike
    lengths, before = head_lengths(state.cells, num_tokens, cache), state.head_positions

    def of(layer: int, head: int) -> Tensor:
        length, left = int(lengths[layer, head]), torch.empty(0, dtype=torch.int32, device=cache.device)
        if before is not None:
            left = before[layer][head]
        new = torch.arange(end - length + len(left), end, dtype=torch.int32, device=cache.device)
        here = torch.ones(length, dtype=torch.bool)
        here[gone] = False
        return torch.cat([left, new])[here.to(cache.device)]

    state.head_positions = [
        [of(layer, head) for head in range(cache.num_kv_heads)] for layer in range(cache.num_layers)
    ]
