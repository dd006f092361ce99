"""Decode graphs on the CPU: a capture that calls the function again, over the reference's attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim import LLM
from kvreclaim.engine.execute.graphs import DecodeGraphs
from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import LayerCache
from kvreclaim.ops.transformed_keys import transformed


class Replayed:
    """Keeps the function and calls it again; counts. Refuses sizes for which `fails` is true."""

    def __init__(self, fails: Callable[[int], bool] = lambda rows: False) -> None:
        self.tried: list[int] = []
        self.captured: list[int] = []
        self.replays = 0
        self._fails = fails

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        rows = run().shape[0]
        self.tried.append(rows)
        if self._fails(rows):
            raise RuntimeError("cannot be captured\nmore detail")
        self.captured.append(rows)

        def replay() -> Tensor:
            self.replays += 1
            return run()

        return replay


class ReferenceDecode:
    """The reference with decode_attention, which reads its tables' tensors at every call, as kernels do."""

    def __getattr__(self, name: str) -> Any:
        return getattr(reference, name)

    def write_kv(self, layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        real = slot_mapping >= 0
        reference.write_kv(layer, k[real], v[real], slot_mapping[real])

    def static_tables(
        self, block_table: Tensor, seq_lens: Tensor, shifts: Tensor, *, num_kv_heads: int, max_seq_len: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert num_kv_heads > 0 < max_seq_len
        return block_table, seq_lens, shifts

    def decode_attention(self, q: Tensor, layer: LayerCache, tables: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        block_table, lengths, shifts = tables
        rows = [i for i, length in enumerate(lengths.tolist()) if length]
        slots = [SequenceSlots(np.asarray(block_table[i]), 1, int(lengths[i]), int(shifts[i])) for i in rows]
        out = torch.zeros(len(q), q.shape[1], layer.cache.v_head_dim, dtype=q.dtype)
        if slots:
            batch = AttentionBatch.build(tuple(slots), layer.cache.block_size, q.device)
            out[rows] = reference.paged_attention(q[rows], layer, batch)
        return out


def use_graphs(
    llm: LLM, num_drafts: int = 0, fails: Callable[[int], bool] = lambda rows: False
) -> tuple[DecodeGraphs, Replayed]:
    """Let an engine over the reference replay its decode steps, with so many drafts of each sequence."""
    engine, capture = llm.engine, Replayed(fails)
    assert engine.config.max_model_len is not None
    backend: Any = ReferenceDecode()
    engine.runner.graphs = DecodeGraphs(
        llm.loaded.model,
        engine.cache,
        backend if engine.cache.softmaxes[0].keys is None else transformed(backend),
        engine.groups,
        max_num_seqs=engine.config.max_num_seqs,
        max_model_len=engine.config.max_model_len,
        max_chunk=engine.config.max_num_batched_tokens,
        capture=capture,
        num_drafts=num_drafts,
    )
    return engine.runner.graphs, capture
