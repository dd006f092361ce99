"""Where everything lies in a GGUF file (llama.cpp's format, versions 2 and 3), read without its arrays.

gguf's own GGUFReader makes objects of every word of a vocabulary: 155 MB and 2 s for 49,152 words, more
than the packed weights of such a model themselves.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters of the value types; 8 is a string, 9 an array."""
STRING, ARRAY = 8, 9
ALIGNMENT = 32
"""Alignment of tensors where the file does not say."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: slowest dimension first; kind: ggml's name of the type; offset: in the file"""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


class GgufIndex:
    """The fields and tensors of a file.

    fields:  by key; strings and numbers alone, of arrays nothing
    tensors: by name
    digest:  sha256 of what stands before the tensors' data: config, tokenizer, names and types

    Raises: OSError; ValueError for what is no such file, or ends too early.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._at = 0
        try:
            self._read()
        except struct.error as error:
            raise ValueError("the file ends within its header") from error

    def _read(self) -> None:
        magic, version, num_tensors, num_fields = self._take("4sIQQ")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError(f"it begins with {magic!r} and version {version}, not GGUF and 2 or 3")
        self.fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key, kind = self._string(), self._take("I")[0]
            value = self._value(kind)
            if kind != ARRAY:
                self.fields[key] = value
        infos = [self._info() for _ in range(num_tensors)]
        self.digest = hashlib.sha256(memoryview(self._mapped)[: self._at]).hexdigest()
        alignment = int(self.fields.get("general.alignment", ALIGNMENT))
        start = -(-self._at // alignment) * alignment
        self.tensors = {tensor.name: tensor for tensor in self._placed(infos, start)}

    def _take(self, form: str) -> tuple[Any, ...]:
        values = struct.unpack_from(f"<{form}", self._mapped, self._at)
        self._at += struct.calcsize(f"<{form}")
        return values

    def _string(self) -> str:
        (size,) = self._take("Q")
        (text,) = self._take(f"{size}s")
        return str(text, "utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:
        """A value; None of an array, which is passed over."""
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            if kind not in SCALARS:
                raise ValueError(f"a field has the type {kind}, which GGUF does not know")
            return self._take(SCALARS[kind])[0]
        kind, count = self._take("IQ")
        if kind in SCALARS:
            self._at += struct.calcsize(f"<{SCALARS[kind]}") * count
        elif kind == STRING:
            self._at = self._behind_strings(count)
        else:
            for _ in range(count):
                self._value(kind)
        return None

    def _behind_strings(self, count: int) -> int:
        """Where the file goes on behind so many strings. A vocabulary has hundreds of thousands."""
        mapped, at, size_at = self._mapped, self._at, struct.Struct("<Q").unpack_from
        for _ in range(count):
            at += 8 + size_at(mapped, at)[0]
        return at

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (dims,) = self._string(), self._take("I")
        shape = tuple(reversed(self._take(f"{dims}Q")))
        return (name, shape, *self._take("IQ"))

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterator[GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        for name, shape, kind, offset in infos:
            known = GGMLQuantizationType(kind)
            columns, num_bytes = GGML_QUANT_SIZES[known]
            size = int(np.prod(shape, dtype=np.int64)) // columns * num_bytes
            if start + offset + size > len(self._mapped):
                raise ValueError(f"it ends within the tensor {name}")
            yield GgufTensor(name, shape, known.name, start + offset, size)

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """Its bytes, uint8 [slowest dimension, bytes of a row]: pages of the file until forgotten."""
        found = np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.offset)
        return found.reshape(tensor.shape[0] if tensor.shape else 1, -1)

    def forget(self, tensor: GgufTensor) -> None:
        """Let its pages go, which count as this process's memory as long as they are mapped."""
        first = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapped.madvise(mmap.MADV_DONTNEED, first, tensor.offset + tensor.num_bytes - first)
