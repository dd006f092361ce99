"""A shadow that knows which blocks a prompt reads that is computed sparsely."""

from __future__ import annotations

import math

import torch
from sparse_shadow import SparseShadow

from kvreclaim.compression.prefill.pooled import Pooled

NEAR = 1e-4
"""A block whose score is as near to the threshold may be read or not: nothing is expected of such a tile."""


class PrefillShadow(SparseShadow):
    """Attends, tile by tile and head by head, what the method `pooled` would, found by loops in fp64 over the
    keys that it remembers."""

    def __init__(self, llm, monkeypatch) -> None:
        super().__init__(llm, monkeypatch)
        self.prefill_tiles = 0
        self.blocks_left_out = 0

    def _attend(self, item, history, call, rows):
        out = super()._attend(item, history, call, rows)
        seq, place = item.seq, self.groups.places[call.layer]
        method = seq.request.sparse_prefill
        if method is None or place.table or place.layer < method.layers:
            return out
        assert isinstance(method, Pooled), "the others are compared where their answers are"
        sparse, start, heads = (
            seq.footprint.sparse_rows(seq.num_prompt),
            item.seq.num_computed,
            call.k.shape[1],
        )
        tile = seq.footprint.sparse.tile
        tokens = range(max(start, sparse.start), min(start + item.num_tokens, sparse.stop))
        first = tokens.start
        while first < tokens.stop:
            stop = min(tokens.stop, (first // tile + 1) * tile)
            q = call.q[rows][first - start : stop - start].double().unflatten(1, (heads, -1))
            view = out[first - start : stop - start].view(stop - first, heads, -1, out.shape[-1])
            for head in range(heads):
                held = history.attended(place.layer)[head] if history.live is not None and start else []
                slots = [*map(int, held), *range(start, stop)]
                self._tile(method, q[:, head], slots, stop - first, history, call, head, view[:, head])
            self.prefill_tiles += 1
            first = stop
        return out

    def _tile(self, method, q, slots, num_rows, history, call, head, out):
        """Overwrite out [R, G, Dv] with what rows q [R, G, D], the last ones of these slots, see."""
        keys, values = history.k[call.layer][head][slots], history.v[call.layer][head][slots]
        before = len(slots) - num_rows
        past = before // method.block
        read = list(range(len(slots)))
        if past:
            means = keys[: past * method.block].unflatten(0, (past, -1)).mean(1)
            logits = self._logits(q @ means.T, call).flatten(0, 1)
            scores = (logits - logits.max()).exp().sum(0)
            least = method.alpha * scores.max()
            forced = {*range(min(past, method.sinks)), *range(max(0, past - method.local), past)}
            kept = [b for b in range(past) if b in forced or scores[b] >= least]
            free = [b for b in range(past) if b not in forced]
            if any(abs(scores[b] - least) <= NEAR * scores.max() for b in free) and method.alpha:
                out.fill_(math.nan)
                return
            self.blocks_left_out += past - len(kept)
            gone = {b for b in range(past) if b not in kept}
            read = [i for i in read if i // method.block not in gone]
        at = torch.tensor(read)
        scores = self._logits(q @ keys[at].T, call)  # [R, G, n]
        last = torch.arange(before, before + num_rows)
        scores = scores.masked_fill(at > last[:, None, None], -torch.inf)
        if call.softmax.sinks is not None:
            heads = call.k.shape[1]
            own = call.softmax.sinks.double().view(heads, -1)[head][None, :, None]
            scores = torch.cat([scores, own.expand(len(scores), -1, 1)], -1)
        out.copy_(scores.softmax(-1)[..., : len(at)] @ values[at])

    def _logits(self, products, call):
        logits, cap = products * call.softmax.scale, call.softmax.softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)
