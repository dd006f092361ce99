"""A session in a safetensors file: tensors, what they were computed with, and a checksum of each."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_128_hexdigest

from kvreclaim.errors import InvalidArgumentError

VERSION = 1
KEY = "kvreclaim_session"


@dataclass(frozen=True, slots=True, eq=False)
class SessionFile:
    """fields: what the bytes depend on (Namespace.fields); facts: of the session itself, as JSON has them."""

    fields: Mapping[str, str]
    facts: Mapping[str, Any]
    tensors: Mapping[str, Tensor]

    def save(self, path: str | os.PathLike[str]) -> int:
        """Whole or not at all: another file first, which then takes this one's name. Readable by its owner
        alone. Returns: its bytes. Raises: OSError."""
        target = Path(path)
        tensors = {name: tensor.contiguous().cpu() for name, tensor in self.tensors.items()}
        said = {
            "version": VERSION,
            "fields": dict(self.fields),
            "facts": dict(self.facts),
            "checksums": {name: _checksum(tensor) for name, tensor in tensors.items()},
        }
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        os.close(handle)
        try:
            save_file(tensors, name, metadata={KEY: json.dumps(said)})
            with open(name, "rb") as written:
                os.fsync(written.fileno())
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
        return target.stat().st_size

    @classmethod
    def load(cls, path: str | os.PathLike[str], fields: Mapping[str, str]) -> SessionFile:
        """Read and check everything. fields: of the engine that asks.

        Raises: OSError, InvalidArgumentError for a file that is no session, is damaged, or was saved with
            another model, format or block size, which the error names.
        """
        try:
            with safe_open(path, framework="pt") as file:
                said = json.loads((file.metadata() or {}).get(KEY, "null"))
                if not isinstance(said, dict) or said.get("version") != VERSION:
                    raise InvalidArgumentError(
                        f"{os.fspath(path)} is no session of version {VERSION}; save it again.",
                        field="filename",
                    )
                _check_fields(said["fields"], fields, path)
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, json.JSONDecodeError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"{os.fspath(path)} is no session, or is damaged ({error}); save it again.", field="filename"
            ) from error
        damaged = [
            name
            for name in {*said["checksums"], *tensors}
            if name not in tensors or said["checksums"].get(name) != _checksum(tensors[name])
        ]
        if damaged:
            raise InvalidArgumentError(
                f"{os.fspath(path)} is damaged: {', '.join(sorted(damaged))}; save it again.",
                field="filename",
            )
        return cls(said["fields"], said["facts"], tensors)


def _check_fields(saved: Mapping[str, str], asked: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    for name, value in asked.items():
        if saved.get(name) != value:
            raise InvalidArgumentError(
                f"{os.fspath(path)} was saved with another {name}: {str(saved.get(name))[:80]!r}, here it is "
                f"{value[:80]!r}; load it with the model, format and block size that it was saved with.",
                field=name,
            )


def _checksum(tensor: Tensor) -> str:
    flat: Any = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return f"{tensor.dtype} {tuple(tensor.shape)} {xxh3_128_hexdigest(memoryview(flat))}"
