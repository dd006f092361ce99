"""A copy of a GGUF file's packed weights, in the kernels' layout and in the cache directory. The next start
maps it instead of packing the weights again."""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import torch
from torch import Tensor

from kvreclaim.model.quantized.copy_file import MAKING, copy_path, make_room, read_contents, write_contents
from kvreclaim.model.quantized.gguf_file import GgufSource
from kvreclaim.ops.packed import PACKED_LAYOUT, Each, PackedMatrix
from kvreclaim.temporary import lock
from kvreclaim.weights.packed import CodeRule

PAGE = 4096
STRIDE = 4 << 20
"""Distance of sampled pages: any change of twice as many bytes is noticed."""
GROWTH = 1.25
"""Largest size of a copy, as a multiple of its source's size."""
FIELDS = ("in_features", "out_features", "bits", "group")
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.uint8, torch.float16, torch.float32)}
logger = logging.getLogger(__name__)


class CopiedSource:
    """A WeightSource over a GGUF file that reads its matrices from the copy, or writes them there.

    A context manager; a successful exit publishes the new copy. A thread writes one matrix while the next is
    packed.

    mapped_bytes: size of the mapped copy; 0 if the weights were packed
    """

    def __init__(self, source: GgufSource) -> None:
        self._source, self._target = source, copy_path(source.file)
        self._origin = _origin(source)
        self._kept: dict[str, PackedMatrix] | None = None
        self._writer: _Writer | None = None
        self._beside = ThreadPoolExecutor(1, "kvreclaim-copy")
        self._written: Future[None] | None = None
        self.mapped_bytes = 0
        if (found := _read(self._target, self._origin)) is not None:
            self._kept, self.mapped_bytes = found

    def _give_up(self, error: OSError) -> None:
        """Stop writing the copy, with a warning. The model loads without it."""
        logger.warning(
            "no copy of the packed weights of %s is kept in %s (%s): every start packs them again; free the "
            "disk, set KVRECLAIM_HOME to another directory, or pass --no-cache-packed-weights",
            self._source.file.name,
            self._target.parent,
            error,
        )
        if self._writer is not None:
            self._writer.abandon()
        self._writer = None

    def __enter__(self) -> CopiedSource:
        if self._kept is None:
            try:
                self._writer = _Writer(self._target, self._origin)
            except OSError as error:
                self._give_up(error)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._beside.shutdown()
        if self._writer is None:
            return
        if kind is not None:
            self._writer.abandon()
            return
        try:
            self._wait()
            self._writer.finish()
        except OSError as failed:
            self._give_up(failed)

    def _wait(self) -> None:
        """Wait until the last matrix is written. Raises: OSError."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    @property
    def label(self) -> str:
        return self._source.label

    @property
    def packs_every_matrix(self) -> bool:
        return self._source.packs_every_matrix

    def packed(self, name: str, shape: tuple[int, int], each: Each) -> PackedMatrix | None:
        return self._source.packed(name, shape, each, self._copied)

    def _copied(self, name: str, make: Callable[[], PackedMatrix]) -> PackedMatrix:
        if self._kept is not None and name in self._kept:
            return self._kept[name]
        made = make()
        if self._writer is not None:
            try:
                self._wait()
                self._written = self._beside.submit(self._writer.add, name, made)
            except OSError as error:
                self._give_up(error)
        return made

    def dense(self, name: str) -> Tensor | None:
        return self._source.dense(name)

    def unread(self) -> list[str]:
        return self._source.unread()


def _origin(source: GgufSource) -> dict[str, Any]:
    """Return the identity of a source, which its copy must match."""
    about = source.file.stat()
    return {
        "layout": PACKED_LAYOUT,
        "path": os.path.realpath(source.file),
        "num_bytes": about.st_size,
        "modified_ns": about.st_mtime_ns,
        "changed_ns": about.st_ctime_ns,
        "inode": about.st_ino,
        "header": source.index.digest,
        "sample": _sample(source),
    }


def _sample(source: GgufSource) -> str:
    """Return a digest of each tensor's first and last page, and of one page in STRIDE bytes of the file.

    Modification times alone do not suffice: they can be set back, and some file systems round them.
    """
    places = set(range(0, source.file.stat().st_size, STRIDE))
    for tensor in source.index.tensors.values():
        places |= {tensor.offset, max(tensor.offset, tensor.offset + tensor.num_bytes - PAGE)}
    digest = hashlib.sha256()
    with source.file.open("rb", buffering=0) as file:
        for place in sorted(places):
            digest.update(os.pread(file.fileno(), PAGE, place))
    return digest.hexdigest()


class _Writer:
    """Writes matrices one by one into a temporary file. `finish` renames it to its final name."""

    def __init__(self, target: Path, origin: dict[str, Any]) -> None:
        """Open the temporary file. Raises: OSError."""
        target.parent.mkdir(parents=True, exist_ok=True)
        make_room(target, int(origin["num_bytes"] * GROWTH))
        made: IO[bytes] = NamedTemporaryFile(prefix=MAKING, dir=target.parent, delete=False)  # noqa: SIM115
        lock(made.fileno())
        self._target, self._origin, self._file = target, origin, made
        self._matrices: dict[str, Any] = {}

    def add(self, name: str, matrix: PackedMatrix) -> None:
        """Append a matrix. Raises: OSError."""
        parts = {}
        for part, tensor in matrix.parts.items():
            parts[part] = [self._file.tell(), str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
            self._file.write(tensor.view(torch.uint8).flatten().numpy().data)
            self._file.write(bytes(-self._file.tell() % PAGE))
        table = None if matrix.table is None else matrix.table.tolist()
        sizes = {field: getattr(matrix, field) for field in FIELDS}
        self._matrices[name] = sizes | {"rule": matrix.grid.value, "table": table, "parts": parts}

    def finish(self) -> None:
        """Append the header and publish the file. Raises: OSError."""
        size = self._file.tell()
        if size == 0:  # nothing is packed
            self.abandon()
            return
        _forget(self._file)
        with open(self._file.name, "rb") as file:
            checksum = _checksum(_mapped(file, size))
        write_contents(self._file, {"origin": self._origin, "checksum": checksum, "matrices": self._matrices})
        self._file.flush()
        os.replace(self._file.name, self._target)  # locked until it has its name
        self._file.close()

    def abandon(self) -> None:
        """Delete the temporary file."""
        try:
            self._file.close()
        except OSError:  # the disk is full: the remaining bytes do not fit either
            pass
        finally:
            Path(self._file.name).unlink(missing_ok=True)


def _read(path: Path, origin: dict[str, Any]) -> tuple[dict[str, PackedMatrix], int] | None:
    """Map a copy's matrices and return them with its size; None if there is no intact copy of that origin."""
    try:
        with path.open("rb") as file:
            contents, size = read_contents(file)
            if contents["origin"] != origin:
                return None
            data = _mapped(file, size)
        if _checksum(data) != contents["checksum"]:
            raise ValueError("its bytes are others than were written")
        found = {name: _matrix(data, each) for name, each in contents["matrices"].items()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        logger.warning("%s is no copy that can be used (%s), and is made again", path, error)
        return None
    try:
        os.utime(path)  # make_room deletes the oldest one first
    except OSError:
        logger.debug("%s cannot be marked as used", path)
    return found, size


def _forget(file: IO[bytes]) -> None:
    """Drop a written file from the page cache, where it lies in small pages. The next read brings it back in
    huge pages where the file system has them."""
    file.flush()
    if hasattr(os, "posix_fadvise"):
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _mapped(file: IO[bytes], size: int) -> Tensor:
    """Map the first bytes of a file copy-on-write."""
    if size == 0 or size % PAGE:
        raise ValueError("its matrices do not end with a page")
    mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system without huge pages
            mapped.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def _checksum(data: Tensor) -> str:
    """Return a digest of all pages' sums. Runs at memory speed, on pages that products need anyway."""
    sums = data.view(torch.int64).view(-1, PAGE // 8).sum(1)
    return hashlib.sha256(sums.numpy().tobytes()).hexdigest()


def _matrix(data: Tensor, header: dict[str, Any]) -> PackedMatrix:
    parts = {}
    for name, (first, dtype, shape) in header["parts"].items():
        kind = DTYPES[dtype]
        size = torch.Size(shape).numel() * kind.itemsize
        parts[name] = data[first : first + size].view(kind).view(shape)
    table = None if header["table"] is None else torch.tensor(header["table"])
    return PackedMatrix.of_parts(
        parts, grid=CodeRule(header["rule"]), table=table, **{field: header[field] for field in FIELDS}
    )
