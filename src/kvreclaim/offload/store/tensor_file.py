"""Safetensors files through FileIO, and without copies of the tensors."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from kvreclaim.offload.store.file_io import FileIO

DTYPES: Final = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER_BYTES: Final = 64 << 20
METADATA: Final = "__metadata__"


class MalformedError(ValueError):
    """The file is not a safetensors file, or is incomplete."""


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """header: preceded by its length; data: the tensors' own bytes, which follow it in this order."""

    header: bytes
    data: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return len(self.header) + sum(part.nbytes for part in self.data)

    def write(self, fd: int, io: FileIO) -> None:
        """Write from the file's beginning. Raises: OSError."""
        parts = [memoryview(self.header), *self.data]
        if not _move(lambda parts, at: io.pwritev(fd, parts, at), parts, 0):
            raise OSError(errno.EIO, "the disk takes no more bytes of the file, and reports no error")


def pack(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Packed:
    """Pack host tensors of DTYPES, which must not change until they are written."""
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    data, end = [], 0
    for name in sorted(tensors):
        tensor = tensors[name]
        start, end = end, end + tensor.nbytes
        entries[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        data.append(bytes_of(tensor))
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return Packed(len(text).to_bytes(8, "little") + text, tuple(data))


def read(fd: int, io: FileIO) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a whole file. Raises: MalformedError, OSError."""
    metadata, places, first = read_header(fd, io)
    tensors, parts = {}, []
    for name, (dtype, shape, _) in sorted(places.items(), key=lambda each: each[1][2]):
        tensors[name] = torch.empty(shape, dtype=dtype)
        parts.append(bytes_of(tensors[name]))
    _read(fd, io, parts, first)
    return metadata, tensors


Places = dict[str, tuple[torch.dtype, list[int], int]]
"""dtype, shape and first byte of each tensor."""


def read_header(fd: int, io: FileIO) -> tuple[dict[str, str], Places, int]:
    """Return metadata, the tensors' positions, and the start of the data. Raises: MalformedError, OSError."""
    size = os.fstat(fd).st_size
    prefix = bytearray(8)
    _read(fd, io, [memoryview(prefix)], 0)
    length = int.from_bytes(prefix, "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        raise MalformedError(f"its header has {length} bytes, and the file {size}")
    header = bytearray(length)
    _read(fd, io, [memoryview(header)], 8)
    try:
        entries = json.loads(header)
        metadata = {str(name): str(value) for name, value in entries.pop(METADATA, {}).items()}
        places = {name: _place(entry) for name, entry in entries.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise MalformedError(f"its header can't be read: {error}") from error
    end = 0
    for dtype, shape, start in sorted(places.values(), key=lambda place: place[2]):
        if start != end:
            raise MalformedError("its tensors do not follow each other")
        end += math.prod(shape) * dtype.itemsize
    if end != size - 8 - length:
        raise MalformedError(f"its tensors take {end} bytes, and {size - 8 - length} are there")
    return metadata, places, 8 + length


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the host."""
    flat: Any = tensor.view(-1).view(torch.uint8).numpy() if tensor.numel() else b""
    return memoryview(flat)


def _place(entry: Any) -> tuple[torch.dtype, list[int], int]:
    dtype, shape = DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
    start, end = (int(n) for n in entry["data_offsets"])
    if min(shape, default=0) < 0 or end - start != math.prod(shape) * dtype.itemsize:
        raise MalformedError(f"{shape} of {dtype} takes no {end - start} bytes")
    return dtype, shape, start


def _read(fd: int, io: FileIO, parts: Sequence[memoryview], at: int) -> None:
    if not _move(lambda parts, at: io.preadv(fd, parts, at), parts, at):
        raise MalformedError("the file ends too early")


def _move(call: Any, parts: Sequence[memoryview], at: int) -> bool:
    """Repeat a call, which may be partial, until all parts are moved; False if it moves nothing before."""
    left = [part for part in parts if part.nbytes]
    while left:
        moved = call(left, at)
        if moved <= 0:
            return False
        at += moved
        while left and moved >= left[0].nbytes:
            moved -= left.pop(0).nbytes
        if moved:
            left[0] = left[0][moved:]
    return True
