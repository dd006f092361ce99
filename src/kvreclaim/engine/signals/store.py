"""Tensors with one row per sequence that needs the signal: queries, attention, digests."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.moving import to_device


class ByteBudget:
    """Bytes of all stores together. A store that grows counts twice while it is copied.

    limit: None for no limit
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.used = 0

    def fits(self, num_bytes: int) -> bool:
        """Return whether num_bytes more bytes fit."""
        return self.limit is None or self.used + num_bytes <= self.limit

    def change(self, old: int, new: int) -> None:
        """Replace `old` bytes by `new` ones. Raises: MemoryError if the new ones do not fit next to the
        old ones."""
        if new > old and not self.fits(new):
            raise MemoryError(
                f"signals of policies hold {self.used} bytes and need {new} more, but max_signal_bytes is "
                f"{self.limit}; raise it, run fewer sequences, or lower the windows or budgets of policies."
            )
        self.used += new - old


class RowStore:
    """One tensor [rows, ...]. Rows are zeroed when taken, and doubled when they run out.

    Without rows nothing is allocated; dropping the last one frees the memory.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, room: ByteBudget
    ) -> None:
        self.tensor = torch.zeros((0, *shape), dtype=dtype, device=device)
        self._room = room
        self._rows: dict[Hashable, int] = {}
        self._free: list[int] = []

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._rows

    def row(self, seq_id: Hashable) -> Tensor:
        """Return the row of a sequence that has one: a view, valid until a row is taken."""
        return self.tensor[self._rows[seq_id]]

    def index(self, seq_ids: Sequence[Hashable]) -> Tensor:
        """[len(seq_ids)] int64 rows of sequences that have one."""
        return to_device(np.array([self._rows[seq_id] for seq_id in seq_ids]), self.tensor.device)

    def take(self, seq_id: Hashable) -> None:
        """Give the sequence a row of zeros unless it has one."""
        if seq_id in self._rows:
            return
        if not self._free:
            used = len(self.tensor)
            self._grow(0, used + 1)
            self._free = list(range(len(self.tensor) - 1, used - 1, -1))
        self._rows[seq_id] = self._free.pop()
        self.row(seq_id).zero_()

    def copy(self, parent_id: Hashable, child_id: Hashable) -> None:
        """Copy the parent's row, if it has one, to the child."""
        if parent_id in self._rows:
            self.take(child_id)
            self.row(child_id).copy_(self.row(parent_id))

    def drop(self, seq_id: Hashable) -> None:
        row = self._rows.pop(seq_id, None)
        if row is not None:
            self._free.append(row)
        if not self._rows and self._free:
            self._room.change(self.tensor.nbytes, 0)
            self.tensor = self.tensor.new_zeros((0, *self.tensor.shape[1:]))
            self._free = []

    def _grow(self, dim: int, size: int) -> None:
        """Grow a dim to at least `size`, and to twice its size if there is room: growth stays cheap."""
        shape = list(self.tensor.shape)
        for new_size in (max(size, 2 * self.tensor.shape[dim]), size):
            shape[dim] = new_size
            needed = math.prod(shape) * self.tensor.itemsize
            if self._room.fits(needed):
                break
        self._room.change(self.tensor.nbytes, needed)
        grown = self.tensor.new_zeros(shape)
        grown.narrow(dim, 0, self.tensor.shape[dim]).copy_(self.tensor)
        self.tensor = grown


class QueryStore(RowStore):
    """The last `window` queries of each layer: [rows, L, window, H, D] in the model's dtype.

    The query at position p lies at p % window, so neither chunks nor compactions move anything.
    """

    def __init__(self, window: int, facts: ModelFacts, room: ByteBudget) -> None:
        layer = facts.layers[0]
        shape = (facts.num_layers, window, layer.num_heads, layer.head_dim)
        super().__init__(shape, facts.dtype, facts.device, room)
        self.window = window
        self._first: dict[Hashable, int] = {}

    def begin(self, seq_id: Hashable, position: int) -> None:
        """Take a row for a sequence with queries from this position on, unless it has one."""
        self.take(seq_id)
        self._first.setdefault(seq_id, position)

    def write(self, seq_id: Hashable, layer: int, first: int, queries: Tensor) -> None:
        """Queries [n, H, D] of one layer from position `first` on; only the last `window` are kept."""
        self.begin(seq_id, first)
        skipped = max(0, len(queries) - self.window)
        places = torch.arange(first + skipped, first + len(queries), device=self.tensor.device) % self.window
        self.row(seq_id)[layer, places] = queries[skipped:].to(self.tensor.dtype)

    def of_step(self, chunks: Sequence[tuple[Hashable, int, int, int]]) -> StepQueries:
        """Return the rows and places of the last queries of each sequence's chunk. Takes rows for new ones.

        chunks: (sequence, position of its first token, tokens, its first row in the step)
        """
        rows: list[np.ndarray] = []
        places: list[np.ndarray] = []
        for seq_id, first, count, first_row in chunks:
            self.begin(seq_id, first)
            positions = np.arange(first + max(0, count - self.window), first + count)
            rows.append(positions - first + first_row)
            places.append(positions % self.window)
        owners = np.repeat([self._rows[seq_id] for seq_id, *_ in chunks], [len(each) for each in rows])
        found = (np.concatenate(rows), owners, np.concatenate(places))
        return StepQueries(self, *(to_device(each, self.tensor.device) for each in found))

    def copy(self, parent_id: Hashable, child_id: Hashable) -> None:
        super().copy(parent_id, child_id)
        if parent_id in self._first:
            self._first[child_id] = self._first[parent_id]

    def drop(self, seq_id: Hashable) -> None:
        super().drop(seq_id)
        self._first.pop(seq_id, None)

    def copy_of(self, seq_id: Hashable) -> tuple[int, Tensor] | None:
        """Return a sequence's first position and its row, on the host; None without a row."""
        if seq_id not in self:
            return None
        return self._first[seq_id], self.row(seq_id).to("cpu", copy=True)

    def resume(self, seq_id: Hashable, kept: tuple[int, Tensor]) -> None:
        """Take back what was parked. Raises: MemoryError if there is no room for it."""
        self.begin(seq_id, kept[0])
        self.row(seq_id).copy_(kept[1])

    def last(self, seq_id: Hashable, layer: int | slice, end: int) -> Tensor:
        """[H, n, D] of a layer, [layers, H, n, D] of a slice: the queries of positions end - n .. end - 1,
        oldest first; n <= window, fewer where they have not been seen."""
        start = max(end - self.window, self._first[seq_id])
        row, first, count = self.row(seq_id)[layer], start % self.window, end - start
        before = row.narrow(-3, first, min(count, self.window - first))
        after = row.narrow(-3, 0, max(0, first + count - self.window))
        return torch.cat([before, after], dim=-3).transpose(-3, -2)


@dataclass(frozen=True, slots=True, eq=False)
class StepQueries:
    """Queries of a step that a store keeps. rows: [n] int64, of the step; sequences, places: where in the
    store."""

    store: QueryStore
    rows: Tensor
    sequences: Tensor
    places: Tensor

    def write(self, layers: slice, queries: Tensor) -> None:
        """Keep the queries [layers, T, H, D] of the step in consecutive layers."""
        target = self.store.tensor.transpose(0, 1)[layers]
        target[:, self.sequences, self.places] = queries[:, self.rows].to(target.dtype)


class MassStore(RowStore):
    """The attention that each slot has received: [rows, L, K, slots] fp32; slots double when they run out."""

    def __init__(self, facts: ModelFacts, room: ByteBudget) -> None:
        shape = (facts.num_layers, facts.layers[0].num_kv_heads, 0)
        super().__init__(shape, torch.float32, facts.device, room)

    def reserve(self, num_slots: int) -> None:
        """Room for so many slots in every row."""
        if num_slots > self.tensor.shape[-1]:
            self._grow(-1, num_slots)

    def copy_of(self, seq_id: int, num_slots: int) -> Tensor | None:
        """[L, K, num_slots] of a sequence, on the host. None without one."""
        if seq_id not in self:
            return None
        return self.row(seq_id)[..., :num_slots].to("cpu", copy=True)

    def resume(self, seq_id: int, kept: Tensor) -> None:
        """Take back what was parked. Raises: MemoryError if there is no room for it."""
        self.take(seq_id)
        self.reserve(kept.shape[-1])
        self.row(seq_id)[..., : kept.shape[-1]] = kept

    def add(self, rows: Tensor, layer: int, sums: Tensor) -> None:
        """Add sums [n, K, C] to slots 0 .. C - 1 of n different rows."""
        self.tensor[:, layer, :, : sums.shape[-1]].index_add_(0, rows, sums)

    def move(self, seq_id: int, kept: Tensor) -> None:
        """Slot kept[l, k, i] goes to slot i, and the others are forgotten; kept [L | 1, K | 1, M] int64."""
        row = self.row(seq_id)
        moved = row.take_along_dim(kept.expand(*row.shape[:2], -1), -1)
        row.zero_()
        row[..., : kept.shape[-1]] = moved


class DigestStore(RowStore):
    """Least and greatest entry of the keys of each full block: [rows, L, 2, K, blocks, D], in the dtype of
    gathered keys, because rounded ones would not be bounds. Blocks double when they run out. Digests follow
    from the cache, so a fork starts without any."""

    def __init__(self, facts: ModelFacts, dtype: torch.dtype, room: ByteBudget) -> None:
        layer = facts.layers[0]
        shape = (facts.num_layers, 2, layer.num_kv_heads, 0, layer.head_dim)
        super().__init__(shape, dtype, facts.device, room)
        self._known: dict[Hashable, int] = {}

    def claim(self, seq_id: int, num_blocks: int) -> range:
        """Make room for the sequence's first num_blocks blocks. Returns: those that have no digest yet; the
        caller writes them, layer by layer."""
        self.take(seq_id)
        if num_blocks > self.tensor.shape[-2]:
            self._grow(-2, num_blocks)
        missing = range(self._known.get(seq_id, 0), num_blocks)
        self._known[seq_id] = num_blocks
        return missing

    def cut(self, seq_id: int, num_blocks: int) -> None:
        """Forget the digests of all but the first num_blocks blocks of a sequence."""
        if seq_id in self._known:
            self._known[seq_id] = min(self._known[seq_id], num_blocks)

    def drop(self, seq_id: Hashable) -> None:
        super().drop(seq_id)
        self._known.pop(seq_id, None)
