"""A session in a safetensors file: tensors, the settings they depend on, and a checksum of each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from xxhash import xxh3_128_hexdigest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.offload.store.file_io import FileIO
from kvreclaim.offload.store.tensor_file import MalformedError, Packed, bytes_of, pack, read

VERSION = 2
KEY = "kvreclaim_session"
CHECKSUM = "kvreclaim_checksum"
"""Name of the checksum of KEY's content."""


@dataclass(frozen=True, slots=True, eq=False)
class SessionFile:
    """fields: what the bytes depend on (Namespace.fields); facts: of the session itself, as JSON."""

    fields: Mapping[str, str]
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def pack(self) -> Packed:
        """Return the contents of the file. The tensors must not change until it is written."""
        tensors = {name: self.tensors[name].contiguous().cpu() for name in sorted(self.tensors)}
        content = {
            "version": VERSION,
            "fields": dict(self.fields),
            "facts": dict(self.facts),
            "checksums": {name: _checksum(tensor) for name, tensor in tensors.items()},
        }
        text = json.dumps(content)
        return pack(tensors, {KEY: text, CHECKSUM: xxh3_128_hexdigest(text.encode())})

    def save(self, path: str | os.PathLike[str]) -> int:
        """Write the file atomically (save_whole). Returns: its bytes. Raises: OSError."""
        packed = self.pack()
        save_whole(packed, Path(path), FileIO())
        return packed.num_bytes

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], fields: Mapping[str, str], io: FileIO | None = None
    ) -> SessionFile:
        """Read and check everything. fields: of the reading engine.

        Raises: OSError, InvalidArgumentError for a file that is no session, is damaged, or was saved with
            another model, format or block size, which the error names.
        """
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            metadata, tensors = read(fd, FileIO() if io is None else io)
            content = _metadata_of(metadata, path)
            _check_fields(content["fields"], fields, path)
            checksums, facts = dict(content["checksums"]), dict(content["facts"])
        except (MalformedError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, InvalidArgumentError):
                raise
            raise InvalidArgumentError(
                f"{os.fspath(path)} is no session, or is damaged ({error}); save it again.", field="filename"
            ) from error
        finally:
            os.close(fd)
        damaged = [
            name
            for name in {*checksums, *tensors}
            if name not in tensors or checksums.get(name) != _checksum(tensors[name])
        ]
        if damaged:
            raise InvalidArgumentError(
                f"{os.fspath(path)} is damaged: {', '.join(sorted(damaged))}; save it again.",
                field="filename",
            )
        return cls(content["fields"], facts, tensors)


def save_whole(packed: Packed, target: Path, io: FileIO) -> None:
    """Write a temporary file and rename it. Readable only by its owner. Raises: OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        try:
            packed.write(handle, io)
            io.sync(handle)
        finally:
            os.close(handle)
        os.replace(name, target)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise
    folder = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _metadata_of(metadata: Mapping[str, str], path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """Parse the metadata of a session. Raises: InvalidArgumentError, ValueError."""
    text = metadata.get(KEY, "null")
    content = json.loads(text)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise InvalidArgumentError(
            f"{os.fspath(path)} is no session of version {VERSION}; save it again.", field="filename"
        )
    if metadata.get(CHECKSUM) != xxh3_128_hexdigest(text.encode()):
        raise MalformedError("its metadata has been changed")
    return content


def _check_fields(saved: Mapping[str, str], own: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    for name, value in own.items():
        if saved.get(name) != value:
            theirs, ours = (text[:80] for text in _difference(str(saved.get(name)), value))
            raise InvalidArgumentError(
                f"{os.fspath(path)} was saved with another {name}: {theirs!r}, here it is {ours!r}; "
                "load it with the model, options, format and block size that it was saved with.",
                field=name,
            )


def _difference(one: str, other: str) -> tuple[str, str]:
    """Return the texts or, for two JSON objects, the members that differ."""
    try:
        first, second = json.loads(one), json.loads(other)
    except ValueError:
        return one, other
    if not isinstance(first, dict) or not isinstance(second, dict):
        return one, other
    names = [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]
    only = [json.dumps({name: each[name] for name in names if name in each}) for each in (first, second)]
    return only[0], only[1]


def _checksum(tensor: Tensor) -> str:
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxh3_128_hexdigest(bytes_of(tensor))}"
