"""A shadow that knows which blocks are read where a policy reads some blocks only."""

from __future__ import annotations

import math

import torch
from score_shadow import ScoreShadow

from kvreclaim.schedule.budget.eviction_method import EvictionMethod


class SparseShadow(ScoreShadow):
    """Attends, row by row, the blocks that Quest's paper would, found by loops over all keys.

    Where the last block that is read and the first that is not are as good as equal, either may be read: no
    number is expected of such a row.
    """

    def __init__(self, llm, monkeypatch) -> None:
        super().__init__(llm, monkeypatch)
        self.sparse_rows = 0
        self.most_read = 0

    def _attend(self, item, history, call, rows):
        out = super()._attend(item, history, call, rows)
        compressor = item.seq.request.compressor
        if (
            compressor is None
            or compressor.eviction_method is not EvictionMethod.READS
            or self.groups.places[call.layer].table
        ):
            return out
        keys, values = history.k[call.layer], history.v[call.layer]
        heads = len(keys)
        for i, position in enumerate(range(item.seq.num_computed, item.seq.num_computed + item.num_tokens)):
            if position < max(item.seq.num_prompt, compressor.budget):
                continue
            q = call.q[rows][i].double().unflatten(0, (heads, -1))
            for head in range(heads):
                read = self._read(q[head], keys[head], position, compressor.config)
                expected = out.view(len(out), heads, -1, out.shape[-1])[i, head]
                if read is None:
                    expected.fill_(math.nan)
                    continue
                self.most_read = max(self.most_read, len(read))
                scores = (q[head] @ keys[head][read].T) * call.softmax.scale
                if call.softmax.softcap is not None:
                    scores = call.softmax.softcap * torch.tanh(scores / call.softmax.softcap)
                if call.softmax.sinks is not None:
                    own = call.softmax.sinks.double().view(heads, -1, 1)[head]
                    scores = torch.cat([scores, own], -1)
                expected.copy_(scores.softmax(-1)[:, : len(read)] @ values[head][read])
            self.sparse_rows += 1
        return out

    def _read(self, q, keys, position, config):
        """The slots that one KV head's queries [G, D] read; None if two blocks tie for the last place."""
        newest = position // self.size
        always = {block for block in range(newest) if block * self.size < max(1, config.sinks)}
        always |= {b for b in range(newest) if (b + 1) * self.size > position + 1 - config.recent}
        bounds = {}
        for block in set(range(newest)) - always:
            inside = keys[block * self.size : (block + 1) * self.size]
            low, high = inside.amin(0), inside.amax(0)
            bounds[block] = float(torch.maximum(q * low, q * high).sum(-1).max())
        places = config.budget // self.size - 1 - len(always)
        order = sorted(bounds, key=lambda block: -bounds[block])
        if 0 < places < len(order):
            last, missed = bounds[order[places - 1]], bounds[order[places]]
            if last - missed <= 1e-5 * (1 + abs(last)):
                return None
        blocks = sorted({*always, *order[:places]})
        slots = [slot for block in blocks for slot in range(block * self.size, (block + 1) * self.size)]
        return [*slots, *range(newest * self.size, position + 1)]
