"""Where everything lies in a GGUF file (llama.cpp's format, versions 2 and 3), read without its arrays.

gguf's own GGUFReader makes objects of every word of a vocabulary: 155 MB and 2 s for 49,152 words, more
than the packed weights of such a model themselves.

A file may come from anywhere. Every count, length and offset is compared with the bytes that are there before
anything is read or allocated by it.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.gguf_checks import EMBEDDING, SIZES, check_fields, quoted

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""struct's letters of the value types; 8 is a string, 9 an array."""
BYTES = {kind: struct.calcsize(f"<{letter}") for kind, letter in SCALARS.items()}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
"""Alignment of tensors where the file does not say."""
MAX_HEADER = 1 << 27
"""Bytes before the tensors' data; vocabularies of 260,000 tokens take 20 MB."""
MAX_FIELDS, MAX_TENSORS = 1 << 16, 1 << 17
MAX_ITEMS = 1 << 22
"""Items of an array."""
MAX_DEPTH = 4
"""Arrays within arrays."""
MAX_NAME, MAX_TEXT, MAX_WORD = (1 << 16) - 1, 1 << 24, 1 << 16
"""Bytes of a key or tensor name, of a string, and of a string in an array."""
MAX_DIMS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor. shape: slowest dimension first; kind: ggml's name of the type; offset: in the file"""

    name: str
    shape: tuple[int, ...]
    kind: str
    offset: int
    num_bytes: int


def has_gguf() -> bool:
    """Whether the package that knows ggml's types is installed."""
    return find_spec("gguf") is not None


def read_index(file: Path) -> GgufIndex:
    """The header of a GGUF file. Raises: InvalidArgumentError where it cannot be read."""
    require(
        has_gguf(),
        "reading GGUF files needs gguf, which this environment lacks; run pip install 'kvreclaim[gguf]'.",
        "model",
    )
    require(file.is_file(), f"{str(file)!r} is no file; pass the path of a .gguf file.", "model")
    try:
        return GgufIndex(file)
    except (OSError, ValueError) as error:
        raise InvalidArgumentError(
            f"{str(file)!r} cannot be read as GGUF ({error}); download it again.", field="model"
        ) from error


class GgufIndex:
    """The fields and tensors of a file.

    fields:  by key; strings and numbers
    lengths: of arrays, by key
    tensors: by name
    digest:  sha256 of what stands before the tensors' data: config, tokenizer, names and types

    Raises: OSError; ValueError for what is no such file, ends too early, or is larger than any model needs.
    """

    def __init__(self, file: Path) -> None:
        with file.open("rb") as opened:
            self._mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        self._at, self._end = 0, min(len(self._mapped), MAX_HEADER)
        self._read()

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the architecture. Raises: ValueError where the file does not say it."""
        return str(self.value("general.architecture"))

    def value(self, key: str) -> Any:
        """Raises: ValueError where the file does not say it."""
        if key not in self.fields:
            raise ValueError(f"the file does not say {quoted(key)}")
        return self.fields[key]

    def num_layers(self) -> int:
        """The number of layers. Sizes that memory is allocated by are compared with the tensors.

        Raises: ValueError where one is missing, or larger than any tensor.
        """
        embedding = self.tensors.get(EMBEDDING)
        if embedding is None or len(embedding.shape) != 2:
            raise ValueError(f"it has no matrix {EMBEDDING}")
        rows, columns = embedding.shape
        words = self.lengths.get("tokenizer.ggml.tokens", 0)
        if words > rows:
            raise ValueError(f"it has {words:,} tokens and {rows:,} rows of {EMBEDDING}")
        largest = max(size for tensor in self.tensors.values() for size in tensor.shape)
        limits = dict.fromkeys(SIZES, largest)
        limits |= {"embedding_length": columns, "block_count": len(self.tensors)}
        for key, most in limits.items():
            name = f"{self.architecture}.{key}"
            size = self.fields.get(name, 1)
            if not 1 <= size <= most:
                raise ValueError(
                    f"{quoted(name)} is {size:,}; with these tensors it must be from 1 to {most:,}"
                )
        return int(self.value(f"{self.architecture}.block_count"))

    def _read(self) -> None:
        magic, version, num_tensors, num_fields = self._take("4sIQQ")
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError(f"it begins with {magic!r} and version {version}, not GGUF and 2 or 3")
        _check_count("fields", num_fields, MAX_FIELDS)
        _check_count("tensors", num_tensors, MAX_TENSORS)
        self.fields: dict[str, Any] = {}
        self.lengths: dict[str, int] = {}
        for _ in range(num_fields):
            key, kind = self._string("a key", MAX_NAME), self._take("I")[0]
            if key in self.fields or key in self.lengths:
                raise ValueError(f"it has two fields {quoted(key)}")
            if kind == ARRAY:
                self.lengths[key] = self._pass_array()
            else:
                self.fields[key] = self._value(kind, key)
        infos = [self._info() for _ in range(num_tensors)]
        self.digest = hashlib.sha256(memoryview(self._mapped)[: self._at]).hexdigest()
        check_fields(self.fields)
        alignment = self.fields.get("general.alignment", ALIGNMENT)
        self.tensors: dict[str, GgufTensor] = {}
        for tensor in self._placed(infos, -(-self._at // alignment) * alignment):
            if tensor.name in self.tensors:
                raise ValueError(f"it has two tensors {quoted(tensor.name)}")
            self.tensors[tensor.name] = tensor

    def _take(self, form: str) -> tuple[Any, ...]:
        start = self._at
        self._pass(struct.calcsize(f"<{form}"))
        return struct.unpack_from(f"<{form}", self._mapped, start)

    def _pass(self, num_bytes: int) -> None:
        if num_bytes > self._end - self._at:
            is_long = self._end == MAX_HEADER
            raise ValueError(
                f"its header has more than {MAX_HEADER:,} bytes"
                if is_long
                else "the file ends within its header"
            )
        self._at += num_bytes

    def _string(self, what: str, longest: int) -> str:
        (size,) = self._take("Q")
        start = self._at
        self._pass(size)
        if size > longest:
            raise ValueError(f"{what} has {size:,} bytes; at most {longest:,} are read")
        try:
            return str(self._mapped[start : self._at], "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{what} is no UTF-8 ({error.reason} at byte {error.start})") from error

    def _value(self, kind: int, key: str) -> Any:
        if kind == STRING:
            return self._string(f"the text of {quoted(key)}", MAX_TEXT)
        if kind not in SCALARS:
            raise ValueError(f"{quoted(key)} has the type {kind}, which GGUF does not know")
        return self._take(SCALARS[kind])[0]

    def _pass_array(self, depth: int = 1) -> int:
        """Returns: how many items it has."""
        kind, count = self._take("IQ")
        _check_count("items of an array", count, MAX_ITEMS)
        if depth > MAX_DEPTH:
            raise ValueError(f"it has arrays within arrays, more than {MAX_DEPTH} deep")
        if kind in BYTES:
            self._pass(BYTES[kind] * count)
        elif kind == STRING:
            self._pass_strings(count)
        elif kind == ARRAY:
            for _ in range(count):
                self._pass_array(depth + 1)
        else:
            raise ValueError(f"an array has items of the type {kind}, which GGUF does not know")
        return int(count)

    def _pass_strings(self, count: int) -> None:
        """A vocabulary has hundreds of thousands."""
        mapped, at, last, size_at = self._mapped, self._at, self._end - 8, struct.Struct("<Q").unpack_from
        for _ in range(count):
            size = size_at(mapped, at)[0] if at <= last else MAX_HEADER
            if size > MAX_WORD:
                self._pass(size)
                raise ValueError(f"an array has a string of {size:,} bytes; at most {MAX_WORD:,} are read")
            at += 8 + size
        self._pass(at - self._at)

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name, (dims,) = self._string("a tensor's name", MAX_NAME), self._take("I")
        _check_count(f"dimensions of {quoted(name)}", dims, MAX_DIMS)
        shape = tuple(reversed(self._take(f"{dims}Q")))
        return (name, shape, *self._take("IQ"))

    def _placed(self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int) -> Iterator[GgufTensor]:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        names = {kind.value: kind for kind in GGMLQuantizationType}
        for name, shape, kind, offset in infos:
            if kind not in names:
                raise ValueError(f"the tensor {quoted(name)} is of ggml's type {kind}, which is not known")
            columns, num_bytes = GGML_QUANT_SIZES[names[kind]]
            size, rest = divmod(math.prod(shape), columns)
            if size == 0 or rest or (shape and shape[-1] % columns):
                raise ValueError(
                    f"{names[kind].name} holds no tensor {quoted(name)} of the shape {list(shape)}"
                )
            if start + offset + size * num_bytes > len(self._mapped):
                raise ValueError(f"it ends within the tensor {quoted(name)}")
            yield GgufTensor(name, shape, names[kind].name, start + offset, size * num_bytes)

    def rows(self, tensor: GgufTensor) -> np.ndarray:
        """Its bytes, uint8 [slowest dimension, bytes of a row]: pages of the file until forgotten."""
        found = np.frombuffer(self._mapped, np.uint8, tensor.num_bytes, tensor.offset)
        return found.reshape(tensor.shape[0] if tensor.shape else 1, -1)

    def forget(self, tensor: GgufTensor) -> None:
        """Let its pages go, which count as this process's memory as long as they are mapped."""
        first = tensor.offset // mmap.PAGESIZE * mmap.PAGESIZE
        self._mapped.madvise(mmap.MADV_DONTNEED, first, tensor.offset + tensor.num_bytes - first)


def _check_count(what: str, count: int, most: int) -> None:
    if count > most:
        raise ValueError(f"it has {count:,} {what}; at most {most:,} are read")
