"""A shadow of kivi4: every attention of the engine is plain attention over what the cache holds at that
moment, and what it holds is the tokens that should be there, within the error of their codes."""

from __future__ import annotations

import numpy as np
import torch
from shadow import History, Shadow
from torch import Tensor

from kvreclaim import LLM
from kvreclaim.engine.attend.cell_tables import head_cells, head_lengths
from kvreclaim.engine.request.request import Sequence
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.cells import cell_view
from kvreclaim.ops.kv_cache import LayerCache, PagedTokens


class KiviShadow(Shadow):
    """Prefix caching off, as for any shadow.

    worst:    difference between an attention of the engine and fp64 over gather_tokens of the same cache
    furthest: of a held number from the token that was written, in units of the spread of its head's tokens
    """

    def __init__(self, llm: LLM, monkeypatch) -> None:
        super().__init__(llm, monkeypatch)
        self.llm = llm
        self.furthest = 0.0
        self.num_checked = 0
        watch_attention(llm, monkeypatch, self._see)

    def _see(self, off: float) -> None:
        self.worst = max(self.worst, off)

    def _compare(self, call, out, latent=None) -> None:
        """Only remember: what is attended is compared where the back-end is asked."""
        row = 0
        for item in self._step:
            self._remember(item, call, slice(row, row + item.num_tokens))
            row += item.num_tokens
        self.num_calls += 1

    def _stored(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v

    def check_held(self) -> None:
        """Between steps: every slot of every running sequence holds the token that it should."""
        for seq in self.llm.engine.scheduler.running:
            history = self.histories.get(seq.seq_id)
            if history is not None and seq.num_computed and not seq.waits_for_fork:
                self._check_sequence(seq, history)

    def _check_sequence(self, seq: Sequence, history: History) -> None:
        engine = self.llm.engine
        cache, table = engine.cache, engine.memory.table(seq.seq_id)
        cells = head_cells(seq, engine.memory, cache)
        lengths = head_lengths(seq.state.cells, table.physical_len, cache)
        slots = torch.arange(table.physical_len).split(self.size)
        present = [place for place, block in zip(slots, table.block_ids, strict=False) if block is not None]
        for layer in range(cache.num_layers):
            for head, positions in enumerate(history.attended(layer)):
                if seq.state.evicted is not None:
                    positions = torch.cat(present)
                    lengths[layer, head] = len(positions)
                length = int(lengths[layer, head])
                ids = cells[layer, head, : -(-length // cache.block_size)]
                held = gather(engine.backend, cell_view(cache).layers[0], ids, length)
                assert len(positions) == length
                for got, tokens in zip(held, (history.k, history.v), strict=True):
                    want = tokens[layer][head]
                    off = (got[0].double() - want[positions]).abs().max()
                    self.furthest = max(self.furthest, float(off / (want.max() - want.min())))
        self.num_checked += 1


def watch_attention(llm: LLM, monkeypatch, see) -> None:
    """Call see(largest difference from fp64 attention) for every paged_attention of the engine."""
    backend = llm.engine.backend
    attend = backend.paged_attention

    def watched(q: Tensor, layer: LayerCache, batch: AttentionBatch) -> Tensor:
        out = attend(q, layer, batch)
        first = 0
        for slots in batch.sequences:
            rows = slice(first, first + slots.query_len)
            first = rows.stop
            if slots.query_len:
                want = attention(backend, q[rows], layer, slots)
                see(float((out[rows].double() - want).abs().max()))
        return out

    monkeypatch.setattr(backend, "paged_attention", watched)


def gather(backend, layer: LayerCache, ids: np.ndarray, length: int) -> tuple[Tensor, Tensor]:
    return backend.gather_tokens(PagedTokens(layer, torch.from_numpy(ids.astype(np.int64)), length))


def attention(backend, q: Tensor, layer: LayerCache, slots: SequenceSlots) -> Tensor:
    """[t, H, Dv] fp64 by the definition; softcaps, windows and sinks are not of these models."""
    softmax = layer.softmax
    assert softmax.softcap is None
    assert softmax.window is None
    assert softmax.sinks is None
    held = -(-slots.seq_len // layer.cache.block_size)
    k, v = (x.double() for x in gather(backend, layer, slots.block_ids[:held], slots.seq_len))
    query = q.double().unflatten(1, (k.shape[0], -1)).permute(1, 2, 0, 3)  # [K, G, t, D]
    scores = torch.einsum("kgtd,ksd->kgts", query, k) * softmax.scale
    places = torch.arange(slots.seq_len)
    hidden = places > places[-len(q) :, None]
    if slots.evicted is not None:
        gone = torch.zeros(k.shape[:2], dtype=torch.bool)
        gone[:, : slots.evicted.shape[-1]] = slots.evicted[layer.index]
        hidden = hidden | gone[:, None, None]
    probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("kgts,ksd->kgtd", probs, v).flatten(0, 1).transpose(0, 1)
