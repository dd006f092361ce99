"""Packed weights in the order of bytes that the kernels of all back-ends read; the layout is
csrc/include/kvreclaim/packed_codes.h."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import cached_property
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.extension import native
from kvreclaim.weights.packed import SUPER_COLUMNS, CodeRule, PackedRows

BLOCK_ROWS = 16
CHUNK = 32
LINE = 64
"""Bytes of a bit of each code of a block's rows in a chunk of columns."""
DTYPES = (torch.float32, torch.bfloat16)
PACKED_LAYOUT = 1
"""Version of the order of bytes; raised with another one, so that copies on disks are made again."""
Each = Callable[[Callable[[int], None], Iterable[int]], Iterable[None]]
"""map, or one that has threads."""


class PackedMatrix:
    """A weight [N, K] of 2 to 8 bits a number, in the kernels' order of bytes."""

    def __init__(self, rows: Iterable[PackedRows], out_features: int) -> None:
        """rows: pieces of the matrix from its first row on; all but the last have a multiple of 16 rows."""
        self.out_features = out_features
        self.parts: dict[str, Tensor] = {}  # by name: data, scales, offsets, supers
        count = 0
        for piece in rows:
            if not self.parts:
                self._begin(piece)
            self._put(count, piece)
            count += piece.codes.shape[0]
        if count != out_features:
            raise ValueError(f"a packed matrix of {out_features} rows was given {count}")

    @classmethod
    def read(
        cls, read: Callable[[int, int], PackedRows], out_features: int, step: int, each: Each
    ) -> PackedMatrix:
        """A matrix of read(first, last), the rows first to last - 1. step: rows of a piece, 16 n"""
        made = cls.__new__(cls)
        made.out_features, made.parts = out_features, {}
        made._begin(read(0, min(BLOCK_ROWS, out_features)))

        def put(first: int) -> None:
            made._put(first, read(first, min(first + step, out_features)))

        for _ in each(put, range(0, out_features, step)):
            pass
        return made

    @classmethod
    def of_parts(
        cls,
        parts: dict[str, Tensor],
        *,
        out_features: int,
        in_features: int,
        bits: int,
        grid: CodeRule,
        group: int,
        table: Tensor | None,
    ) -> PackedMatrix:
        """A matrix of the parts and sizes of another one."""
        made = cls.__new__(cls)
        made.parts, made.out_features = parts, out_features
        made.in_features, made.bits, made.grid = in_features, bits, grid
        made.group, made.table = group, table
        return made

    def _begin(self, first: PackedRows) -> None:
        self.in_features, self.bits, self.grid = first.codes.shape[1], first.bits, first.grid
        self.group, self.table = first.group, first.table
        if self.in_features % (SUPER_COLUMNS if self.grid.has_supers else max(CHUNK, self.group)):
            raise ValueError(f"a packed matrix of {self.in_features} columns has groups of {self.group}")
        blocks = -(-self.out_features // BLOCK_ROWS)
        size = self.bits * LINE * self.in_features // CHUNK
        self.parts["data"] = torch.empty((blocks, size), dtype=torch.uint8)
        for name in ("scales", "offsets", "supers"):
            part = getattr(first, name)
            if part is not None:
                shape = (blocks, *part.shape[1:], BLOCK_ROWS)
                self.parts[name] = torch.empty(shape, dtype=_stored(part).dtype)

    def _put(self, first: int, piece: PackedRows) -> None:
        """Threads may put pieces side by side."""
        if first % BLOCK_ROWS:
            raise ValueError("only the last piece of a packed matrix may end within a block of 16 rows")
        blocks = slice(first // BLOCK_ROWS, -(-(first + piece.codes.shape[0]) // BLOCK_ROWS))
        self.parts["data"][blocks] = _in_lines(_filled(piece.codes), piece.bits)
        for name in ("scales", "offsets", "supers"):
            part, place = getattr(piece, name), self.parts.get(name)
            assert (part is None) == (place is None), f"pieces of a packed matrix differ in {name}"
            if part is not None and place is not None:
                assert _stored(part).dtype == place.dtype, (
                    f"{name} of {part.dtype} for those of {place.dtype}"
                )
                place[blocks] = _filled(_stored(part)).unflatten(0, (-1, BLOCK_ROWS)).movedim(1, -1)

    @cached_property
    def native(self) -> Any:
        """Return the native kernels' view of a matrix in CPU memory."""
        parts = [self.parts.get(name) for name in ("data", "scales", "offsets", "supers")]
        sizes = (self.out_features, self.in_features, self.group)
        return native().Packed(self.codes, self.grid.value, *parts, self.table, *sizes)

    @property
    def codes(self) -> int:
        """Layout of codes, as the kernels number it: nibbles, nibbles of a table, 6 bits, bytes, 2, 3, 5."""
        return 1 if self.table is not None else {4: 0, 6: 2, 8: 3, 2: 4, 3: 5, 5: 6}[self.bits]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Properties that two matrices must share to be stored as one, block after block."""
        table = None if self.table is None else tuple(self.table.tolist())
        types = tuple((name, part.dtype, part.shape[1:]) for name, part in self.parts.items())
        return self.in_features, self.bits, self.grid, self.group, table, types

    @property
    def device(self) -> torch.device:
        return self.parts["data"].device

    def to(self, device: torch.device) -> PackedMatrix:
        """Return the matrix on a device; itself if it is there already."""
        if self.device == device:
            return self
        moved = copy.copy(self)
        moved.__dict__.pop("native", None)
        moved.parts = {name: part.to(device) for name, part in self.parts.items()}
        moved.table = None if self.table is None else self.table.to(device)
        return moved

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> PackedMatrix:
        return self  # never written to


def joined_matrices(matrices: Iterable[PackedMatrix]) -> list[PackedMatrix]:
    """Matrices with the same outputs in the same order, neighbours of one kind as one matrix. The parts of
    those become views of its parts."""
    found: list[PackedMatrix] = []
    for _, group in groupby(matrices, lambda each: each.kind):
        (first, *more) = same = list(group)
        if not more or any(each.out_features % BLOCK_ROWS for each in same[:-1]):
            found += same
            continue
        whole = copy.copy(first)
        whole.out_features = sum(each.out_features for each in same)
        whole.parts = {name: torch.cat([each.parts[name] for each in same]) for name in first.parts}
        for name, part in whole.parts.items():
            blocks = [each.parts[name].shape[0] for each in same]
            for each, view in zip(same, part.split(blocks), strict=True):
                each.parts[name].data = view
        found.append(whole)
    return found


def _stored(part: Tensor) -> Tensor:
    return part.view(torch.uint8) if part.dtype == torch.int8 else part


def _filled(rows: Tensor) -> Tensor:
    """Pad with zero rows to whole blocks."""
    missing = -rows.shape[0] % BLOCK_ROWS
    return torch.cat([rows, rows.new_zeros((missing, *rows.shape[1:]))]) if missing else rows


def _in_lines(codes: Tensor, bits: int) -> Tensor:
    """[16 n, K] -> [n, bytes]: chunks of lines of 16 rows."""
    words = codes.view(torch.int32).unflatten(0, (-1, BLOCK_ROWS)).unflatten(2, (-1, CHUNK // 4))
    words = words.permute(0, 2, 3, 1).contiguous()  # [n, K / 32, 8, 16 rows], each of 4 columns
    if bits == 6:
        halves = words.unflatten(2, (2, 4))
        lines = torch.cat([_fields(halves, 4, 0, 3), _fields(halves, 2, 4, 3)], 3)
    elif bits in (3, 5):
        low = bits - 1
        lines = torch.cat([_fields(words, low), _fields(words, 1, low)], 2)
    else:
        lines = _fields(words, bits)
    return lines.view(torch.uint8).reshape(words.shape[0], -1)


def _fields(words: Tensor, bits: int, first: int = 0, dim: int = 2) -> Tensor:
    """Pack `bits` bits of each byte, from bit `first` on, into lines: as many as a byte has such fields, the
    first word's in the lowest."""
    if bits == 8:
        return words
    fields = (words >> first).bitwise_and_((2**bits - 1) * 0x01010101)
    line, *more = fields.unflatten(dim, (-1, 8 // bits)).unbind(dim + 1)
    for i, part in enumerate(more, 1):
        line |= part << bits * i
    return line
