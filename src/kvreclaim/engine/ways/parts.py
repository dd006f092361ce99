"""A step whose sequences are not all attended alike: each part answers for its own rows of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.ops.cells import CellBatch
from kvreclaim.ops.kv_cache import KVCache, LayerCache


class Part(Protocol):
    """Some sequences of a step."""

    def attend(self, call: AttentionCall, out: Tensor) -> None:
        """Write their rows of out [T, H, Dv]; their keys and values are in the cache."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PlainPart:
    """Sequences with one block table for all layers and heads. rows: [t] int64, theirs in the step."""

    ops: Backend
    cache: KVCache
    batch: AttentionBatch
    rows: Tensor

    def attend(self, call: AttentionCall, out: Tensor) -> None:
        out[self.rows] = self.ops.paged_attention(
            call.q[self.rows], self.cache.layers[call.layer], self.batch
        )


@dataclass(frozen=True, slots=True, eq=False)
class HeadPart:
    """Sequences with a table for each (layer, KV head): every KV head is a sequence of the cell view.

    cells:   the cell view as each layer attends over it
    rows:    [t] int64, theirs in the step
    order:   [t * K] int64, places of (row, KV head) by sequence, KV head and row; None: they lie so already
    batches: (layer, q [t, H, D]) -> the sequences' KV heads with their cells, in this order
    """

    ops: Backend
    cells: tuple[LayerCache, ...]
    rows: Tensor
    order: Tensor | None
    batches: Callable[[int, Tensor], CellBatch]

    def attend(self, call: AttentionCall, out: Tensor) -> None:
        layer = self.cells[call.layer]
        softmax = layer.softmax
        assert softmax.window is None, f"layer {call.layer}: window {softmax.window}, refused by check_policy"
        assert softmax.sinks is None, f"layer {call.layer}: attention sinks, which check_policy refuses"
        num_kv_heads = call.k.shape[1]
        rows = call.q[self.rows]
        q = rows.unflatten(1, (num_kv_heads, -1)).flatten(0, 1)
        found = self.ops.paged_attention(
            q if self.order is None else q[self.order],
            layer,
            self.batches(call.layer, rows),
        )
        if self.order is not None:
            sorted_found, found = found, torch.empty_like(found)
            found[self.order] = sorted_found
        out[self.rows] = found.view(len(self.rows), -1, found.shape[-1])


def head_order(query_lens: list[int], num_kv_heads: int, device: torch.device) -> Tensor | None:
    """HeadPart.order for sequences with so many rows each."""
    if all(length == 1 for length in query_lens):
        return None
    starts = np.cumsum([0, *query_lens])
    heads = np.arange(num_kv_heads)[:, None]
    parts = [
        (np.arange(start, start + length)[None] * num_kv_heads + heads).ravel()
        for start, length in zip(starts, query_lens, strict=False)
    ]
    return torch.from_numpy(np.concatenate(parts)).to(device)
