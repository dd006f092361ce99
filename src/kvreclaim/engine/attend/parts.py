"""A step with several kinds of attention. Each part computes its own rows of the step."""

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


class AttentionPart(Protocol):
    """Some sequences of a step."""

    @property
    def rows(self) -> Tensor:
        """[t] int64, theirs in the step."""
        ...

    def attend(self, call: AttentionCall, q: Tensor) -> Tensor:
        """[t, H, Dv]: what their queries q [t, H, D] see; their keys and values are in the cache."""
        ...


def attend_all(parts: tuple[AttentionPart, ...], call: AttentionCall) -> Tensor:
    """[T, H, Dv] of a step that these parts make up."""
    if len(parts) == 1:
        return parts[0].attend(call, call.q)
    found = [part.attend(call, call.q[part.rows]) for part in parts]
    out = call.q.new_empty((len(call.q), *found[0].shape[1:]))
    for part, own in zip(parts, found, strict=True):
        out[part.rows] = own
    return out


@dataclass(frozen=True, slots=True, eq=False)
class PlainPart:
    """Sequences with one block table for all layers and heads."""

    ops: Backend
    cache: KVCache
    batch: AttentionBatch
    rows: Tensor

    def attend(self, call: AttentionCall, q: Tensor) -> Tensor:
        return self.ops.paged_attention(q, self.cache.layers[call.layer], self.batch)


@dataclass(frozen=True, slots=True, eq=False)
class HeadPart:
    """Sequences with a table for each (layer, KV head): every KV head is a sequence of the cell view.

    cells:   the cell view as each layer attends over it
    order:   [t * K] int64, places of (row, KV head) by sequence, KV head and row; None: they lie so already
    batches: (layer, q [t, H, D]) -> the sequences' KV heads with their cells, in this order
    """

    ops: Backend
    cells: tuple[LayerCache, ...]
    rows: Tensor
    order: Tensor | None
    batches: Callable[[int, Tensor], CellBatch]

    def attend(self, call: AttentionCall, q: Tensor) -> Tensor:
        layer = self.cells[call.layer]
        assert layer.softmax.window is None, f"layer {call.layer}: a window, refused by check_policy"
        by_head = q.unflatten(1, (call.k.shape[1], -1)).flatten(0, 1)
        if self.order is not None:
            by_head = by_head[self.order]
        found = self.ops.paged_attention(by_head, layer, self.batches(call.layer, q))
        if self.order is not None:
            sorted_found, found = found, torch.empty_like(found)
            found[self.order] = sorted_found
        return found.view(len(q), -1, found.shape[-1])


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
