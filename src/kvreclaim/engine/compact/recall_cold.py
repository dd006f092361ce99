"""Host memory for cold pages: reference-counted units that several sequences may share."""

from __future__ import annotations

import torch
from torch import Tensor


class ColdPool:
    """[rows, unit_bytes] on the host. Memory is committed on first touch, or pinned at once with a GPU.

    A row is written once, after it is taken, and freed with its last reference. Forks share rows.
    """

    def __init__(self, unit_bytes: int, max_bytes: int, *, pinned: bool) -> None:
        self.unit_bytes = unit_bytes
        self.num_rows = max_bytes // unit_bytes
        self.bytes = torch.empty((self.num_rows, unit_bytes), dtype=torch.uint8, pin_memory=pinned)
        self._refs = torch.zeros(self.num_rows, dtype=torch.int32)
        self._given = torch.empty(0, dtype=torch.int64)
        self._next = 0

    @property
    def num_free(self) -> int:
        return self.num_rows - self._next + len(self._given)

    @property
    def bytes_in_use(self) -> int:
        return (self.num_rows - self.num_free) * self.unit_bytes

    def take(self, count: int) -> Tensor:
        """[count] int64 rows, one reference each. Raises: MemoryError."""
        if count > self.num_free:
            raise MemoryError(
                f"cold pages need {count} units of {self.unit_bytes} bytes, and {self.num_free} of "
                f"{self.num_rows} are free; raise kv_recall_size, or run fewer sequences."
            )
        again = min(count, len(self._given))
        used, self._given = self._given[:again], self._given[again:]
        fresh = torch.arange(self._next, self._next + count - again)
        self._next += count - again
        rows = torch.cat([used, fresh])
        self._refs[rows] = 1
        return rows

    def share(self, rows: Tensor) -> None:
        """Add one reference to each row; no row twice."""
        assert bool((self._refs[rows] > 0).all()), "a row without references is shared"
        self._refs[rows] += 1

    def give_back(self, rows: Tensor) -> None:
        """Remove one reference from each row; no row twice."""
        left = self._refs[rows] - 1
        assert bool((left >= 0).all()), "a row is given back twice"
        self._refs[rows] = left
        self._given = torch.cat([rows[left == 0], self._given])

    def check(self, holders: list[Tensor]) -> None:
        """Raise AssertionError unless the references are those of these holders' rows."""
        found = torch.zeros_like(self._refs)
        for rows in holders:
            found.index_add_(0, rows, torch.ones(len(rows), dtype=torch.int32))
        assert torch.equal(found, self._refs), "cold pages' references differ from their holders"
        assert int((found > 0).sum()) == self.num_rows - self.num_free, "free rows are counted wrong"
