"""Sequences of a step that attend latents with expanded keys, and those with absorbed queries."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.model.attention import LatentCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import LayerCache, PagedTokens
from kvreclaim.ops.latent import expanded_attention


@dataclass(frozen=True, slots=True, eq=False)
class ExpandedPart:
    """One sequence. rows: its tokens in the step; block_ids: [blocks] int64."""

    rows: slice
    block_ids: Tensor
    num_tokens: int

    def attend(self, call: LatentCall, ops: Backend, layer: LayerCache, out: Tensor) -> None:
        """Write its rows of out [T, H, dv]; its latents are in the cache."""
        tokens = PagedTokens(layer, self.block_ids, self.num_tokens)
        out[self.rows] = expanded_attention(ops, tokens, call.queries(self.rows), call.weights)


@dataclass(frozen=True, slots=True, eq=False)
class AbsorbedPart:
    """All other sequences. rows: [t] int64, their tokens in the step."""

    rows: Tensor
    batch: AttentionBatch

    def attend(self, call: LatentCall, ops: Backend, layer: LayerCache, out: Tensor) -> None:
        """Write their rows of out [T, H, dv]; their latents are in the cache."""
        found = ops.paged_attention(call.absorbed(self.rows).q, layer, self.batch)
        out[self.rows] = call.finish(found)


LatentParts = tuple[ExpandedPart | AbsorbedPart, ...]


def latent_parts(call: LatentCall, batch: AttentionBatch) -> LatentParts:
    """Group sequences by their kind of attention, once per step; () if all absorb.

    Sequences are expanded if that saves multiplications (UpProjection.expands), as for long prompts.
    Slots at positions of their own stay absorbed, and so do layers with a window, soft-capping or sinks.
    """
    plain, softmax = call.call, call.call.softmax
    if softmax.window is not None or softmax.softcap is not None or softmax.sinks is not None:
        return ()
    rotary = plain.k.shape[-1] - plain.v.shape[-1]

    def expands(seq: SequenceSlots) -> bool:
        return seq.slot_positions is None and call.weights.expands(seq.query_len, seq.seq_len, rotary)

    return batch.cached("latent parts", lambda batch: _parts(batch, [expands(s) for s in batch.sequences]))


def _parts(batch: AttentionBatch, expands: list[bool]) -> LatentParts:
    if not any(expands):
        return ()
    device = batch.slot_mapping.device
    starts = np.cumsum([0, *batch.query_lens])
    parts: list[ExpandedPart | AbsorbedPart] = []
    others: list[int] = []
    for i, seq in enumerate(batch.sequences):
        if expands[i]:
            ids = torch.from_numpy(seq.block_ids).to(device, torch.int64)
            parts.append(ExpandedPart(slice(int(starts[i]), int(starts[i + 1])), ids, seq.seq_len))
        else:
            others.append(i)
    if others:
        parts.append(AbsorbedPart(batch.rows_of(others), batch.part(others)))
    return tuple(parts)
