"""The journal of an evaluation, one line per example, from which a killed run continues."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.results import Result

JOURNAL = "journal.jsonl"


def cell_key(about: Mapping[str, Any]) -> str:
    """Return a digest of everything that determines a cell's results."""
    text = json.dumps(about, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


class Journal:
    """Results by cell and example. Each append is on disk when it returns; an incomplete last line after a
    kill is dropped at the next start.

    directory: None keeps everything in memory
    Raises: InvalidArgumentError if the directory cannot be written, or another run holds it.
    """

    def __init__(self, directory: Path | None) -> None:
        self._results: dict[str, dict[int, Result]] = {}
        self._file: int | None = None
        if directory is None:
            return
        path = directory / JOURNAL
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InvalidArgumentError(f"--out {str(directory)!r} cannot be used: {error}.") from error
        try:
            _lock(self._file, path)
            self._read(self._file, path)
        except BaseException:
            self.close()
            raise

    def of(self, key: str) -> Mapping[int, Result]:
        return self._results.get(key, {})

    def append(self, key: str, about: Mapping[str, Any], results: Sequence[tuple[int, Result]]) -> None:
        """Store results of a cell; `about` is written once, for human readers."""
        lines: list[dict[str, Any]] = [] if key in self._results else [{"cell": key, "about": dict(about)}]
        lines += [{"cell": key, "index": index, "result": result.model_dump()} for index, result in results]
        self._results.setdefault(key, {}).update(results)
        if self._file is not None:
            data = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines).encode()
            while data:
                data = data[os.write(self._file, data) :]
            os.fsync(self._file)

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self, file: int, path: Path) -> None:
        with os.fdopen(os.dup(file), "rb") as stream:
            data = stream.read()
        whole = data.rfind(b"\n") + 1
        try:
            for line in data[:whole].splitlines():
                record = json.loads(line)
                cell = self._results.setdefault(record["cell"], {})
                if "index" in record:
                    cell[record["index"]] = Result.model_validate(record["result"])
        except (ValueError, KeyError, TypeError) as error:
            raise InvalidArgumentError(
                f"{str(path)!r} is no journal of this version, or damaged; remove it or name another --out."
            ) from error
        os.ftruncate(file, whole)
        os.lseek(file, whole, os.SEEK_SET)


def _lock(file: int, path: Path) -> None:
    """Refuse a journal that another process is writing."""
    try:
        import fcntl
    except ImportError:  # not on this system, where callers must avoid two runs in one directory
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise InvalidArgumentError(
            f"{str(path)!r} is in use by another run; wait for it, or name another --out."
        ) from error
