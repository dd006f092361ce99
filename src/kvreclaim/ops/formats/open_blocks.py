"""Blocks that are not full yet, in bf16 beside the pool: the tail of every running sequence.

A row holds one block over all layers and heads. Rows are keyed by block, so sequences that share a block
share its row, and a row lives as long as `keep` names its block. Whether a unit's numbers lie in its row says
the unit itself (kivi_codec.OPEN): a row outlives the write that seals its block, so that a pass which fails
half-way can be run again, and the layers of a block differ in the midst of a pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.ops.facts import CacheShape
from kvreclaim.ops.formats.format import KVFormat

NO_ROW = -1


@dataclass(frozen=True, slots=True, eq=False)
class Writes:
    """Where the tokens of one write go, the same for every layer. Tokens are rows of k and v of the write.

    tokens, rows, offsets: [p] int64, tokens of blocks that are not filled by this write alone
    whole:   [n, S] int64 tokens of the blocks that it fills from their first slot to their last
    ended:   [m] int64 rows of the blocks that it ends
    sealed:  [n + m] int64 blocks, whole ones first
    opened:  [q] int64 blocks that it begins and does not end
    """

    tokens: Tensor
    rows: Tensor
    offsets: Tensor
    whole: Tensor
    ended: Tensor
    sealed: Tensor
    opened: Tensor


class OpenBlocks:
    """The rows and whose they are. Fixed size: kernels keep pointers to k, v and row_of.

    k:      [R, L, K, S, D] bf16; v: [R, L, K, S, Dv] bf16
    row_of: [B] int32 on the device; NO_ROW for a block without a row
    """

    def __init__(self, shape: CacheShape, num_rows: int, device: torch.device) -> None:
        rows = (num_rows, shape.num_layers, shape.num_kv_heads, shape.block_size)
        self.k = torch.zeros((*rows, shape.k_dim), dtype=torch.bfloat16, device=device)
        self.v = torch.zeros((*rows, shape.v_dim), dtype=torch.bfloat16, device=device)
        self.row_of = torch.full((shape.num_blocks,), NO_ROW, dtype=torch.int32, device=device)
        self.block_size = shape.block_size
        self._rows: dict[int, int] = {}
        self._free = list(reversed(range(num_rows)))
        self._sealed: set[int] = set()
        self._planned: tuple[Tensor, np.ndarray, Writes] | None = None

    @property
    def nbytes(self) -> int:
        return self.k.nbytes + self.v.nbytes + self.row_of.nbytes

    @property
    def num_rows(self) -> int:
        return self.k.shape[0]

    @property
    def blocks(self) -> frozenset[int]:
        """Blocks that have a row."""
        return frozenset(self._rows)

    def keep(self, blocks: Collection[int]) -> None:
        """Only these blocks are being filled from here on; the rows of all others are free again."""
        wanted = set(blocks)
        self.drop([block for block in self._rows if block not in wanted])
        self._sealed.clear()

    def drop(self, blocks: Iterable[int]) -> None:
        """These blocks begin anew, or end: their rows, where they have one, are free again."""
        gone = [block for block in blocks if block in self._rows]
        self._planned = None
        if gone:
            self._free += [self._rows.pop(block) for block in gone]
            self._sealed.difference_update(gone)
            self.row_of[self._index(gone)] = NO_ROW

    def copy(self, pairs: Sequence[tuple[int, int]]) -> Tensor:
        """(source, target): the target's row becomes a copy of the source's. A source without a row leaves
        the target's as it is: this copy was made already, by a pass that failed after it.

        Returns: [n] int64, the targets that have a row now.
        """
        found = [pair for pair in pairs if pair[0] in self._rows]
        if found:
            sources = self._index(self._rows[source] for source, _ in found)
            targets = self._index(self.take([target for _, target in found]))
            self.k[targets], self.v[targets] = self.k[sources], self.v[sources]
        return self._index(target for _, target in pairs if target in self._rows)

    def take(self, blocks: Sequence[int], *, between_passes: bool = False) -> list[int]:
        """The rows of these blocks; one that had none gets a row of zeros.

        between_passes: rows of sealed blocks, which only a pass that is run again asks for, may be taken
        """
        new = [block for block in blocks if block not in self._rows]
        if between_passes and len(new) > len(self._free):
            self.drop([block for block in self._sealed if block not in blocks])
        assert len(new) <= len(self._free), (
            f"{len(self._rows)} of {self.num_rows} rows hold open blocks, and {len(new)} more are needed"
        )
        self._planned = None
        self._sealed.difference_update(blocks)
        if new:
            rows = [self._free.pop() for _ in new]
            self._rows.update(zip(new, rows, strict=True))
            index = self._index(rows)
            self.k[index], self.v[index] = 0, 0  # a NaN of another request would pass through masks
            self.row_of[self._index(new)] = index.int()
        return [self._rows[block] for block in blocks]

    def copy_of(self, block: int) -> tuple[Tensor, Tensor] | None:
        """Keys [L, K, S, D] and values [L, K, S, Dv] of a block's row, on the host; None without a row."""
        row = self._rows.get(block)
        return None if row is None else (self.k[row].cpu().clone(), self.v[row].cpu().clone())

    def put(self, block: int, k: Tensor, v: Tensor) -> None:
        """Give a block a row with these numbers."""
        (row,) = self.take([block], between_passes=True)
        self.k[row], self.v[row] = k.to(self.k.device), v.to(self.v.device)

    def seal(self, blocks: Iterable[int]) -> None:
        """These blocks are full and encoded in all layers; a row that one has may be taken from it."""
        self._sealed.update(block for block in blocks if block in self._rows)

    def writes(self, slots: Tensor) -> Writes:
        """Effects of a write to these slots, [T] int64, no slot twice, on blocks; takes the rows it needs.

        Worked out at the first layer of a pass: the same slots again are those of another layer, until `keep`
        begins the next one. One tensor for all layers is read on the host once.
        """
        if self._planned is None or self._planned[0] is not slots:
            wanted = slots.cpu().numpy()
            if self._planned is None or not np.array_equal(self._planned[1], wanted):
                self._planned = (slots, wanted, self._plan(wanted))
            self._planned = (slots, *self._planned[1:])
        return self._planned[2]

    def _plan(self, slots: np.ndarray) -> Writes:
        size = self.block_size
        order = np.argsort(slots, kind="stable")
        blocks, starts, counts = np.unique(slots[order] // size, return_index=True, return_counts=True)
        offsets = slots % size
        is_whole = counts == size
        ends = offsets[order[starts + counts - 1]] == size - 1
        begins = offsets[order[starts]] == 0
        partial, ended = blocks[~is_whole], blocks[ends & ~is_whole]
        later = blocks[~begins & ~is_whole].tolist()
        lost = [block for block in later if block not in self._rows]
        assert not lost, f"block {lost[0]} is written from its middle on, but has no open row"
        self.drop(set(partial.tolist()).difference(later))
        rows = dict(zip(partial.tolist(), self.take(partial.tolist()), strict=True))
        self.seal(blocks[ends].tolist())
        tokens = order[np.repeat(~is_whole, counts)]
        whole = order[np.repeat(is_whole, counts)].reshape(-1, size)
        return Writes(
            tokens=self._index(tokens),
            rows=self._index(rows[block] for block in (slots[tokens] // size).tolist()),
            offsets=self._index(offsets[tokens]),
            whole=self._index(whole),
            ended=self._index(rows[block] for block in ended.tolist()),
            sealed=self._index([*blocks[is_whole].tolist(), *ended.tolist()]),
            opened=self._index(blocks[begins & ~ends]),
        )

    def _index(self, numbers: Iterable[int] | np.ndarray) -> Tensor:
        values = numbers if isinstance(numbers, np.ndarray) else np.array([*numbers], dtype=np.int64)
        return torch.from_numpy(values.astype(np.int64, copy=False)).to(self.row_of.device)


def rows_beside(form: KVFormat, shape: CacheShape, num_rows: int, device: torch.device) -> OpenBlocks | None:
    """Rows of a cache of this format beside its planes. Raises: InvalidArgumentError if that is no row."""
    if not form.has_open_blocks:
        return None
    require(
        num_rows >= 1,
        f"open_rows is {num_rows}, but {form.name} keeps blocks that are not full in rows; give one or more.",
    )
    return OpenBlocks(shape, num_rows, device)
