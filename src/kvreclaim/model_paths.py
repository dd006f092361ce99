"""Where fetched models lie, and whether they are whole."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

REAL_MODEL = "SmolLM2-135M-Instruct"
"""The language model that `kvreclaim fetch` brings where nothing else is named."""

SOURCE_FILE = "kvreclaim_source.json"
"""Beside the weights of a fetched model: what it was made of, and its files with their sizes in bytes."""

STATS_FILE = "kvreclaim_stats.safetensors"
"""In a model's directory: what calibration has found, read when a policy needs it and no file is named."""


def statistics_beside(model: str | os.PathLike[str]) -> Path:
    """Where a model's statistics lie, unless a file is named: in its directory, or beside its GGUF file."""
    path = Path(model)
    return path.with_suffix(f".{STATS_FILE}") if path.suffix.lower() == ".gguf" else path / STATS_FILE


LAYOUT = 2
"""Raised when a conversion comes to write other files, so that what is there is not taken for them."""


def _home() -> Path:
    """$KVRECLAIM_HOME; without that variable, kvreclaim in the user's cache directory."""
    home = os.environ.get("KVRECLAIM_HOME")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) if home else Path(cache, "kvreclaim")


def models_home() -> Path:
    """Folder of fetched models."""
    return _home() / "models"


def gguf_home() -> Path:
    """Folder of configs and tokenizers that were read out of GGUF files."""
    return _home() / "gguf"


def real_model() -> Path | None:
    """Directory of the language model that `make real-model` or `kvreclaim fetch` brings; None before."""
    directory = models_home() / REAL_MODEL
    return directory if lacks(directory) is None else None


def real_gguf() -> Path | None:
    """The file that the directory of real_model() was made of, whose weights have 4 bits."""
    directory = real_model()
    return None if directory is None else next(iter(directory.glob("*.gguf")), None)


def moved(made: Path, target: Path) -> bool:
    """Move a directory that is whole to its place; False where another is there already. Raises: OSError."""
    try:
        os.replace(made, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def shipped_statistics(name: str) -> Path:
    """Where the package holds statistics of a model that it can fetch."""
    return Path(__file__).parent / "assets" / f"{name}.safetensors"


def lacks(directory: Path) -> str | None:
    """What a directory lacks to be a fetched model, as words after "it"; None where it lacks nothing."""
    said = source_of(directory)
    if said is None:
        return "was not written by `kvreclaim fetch`"
    if said.get("layout") != LAYOUT:
        return "was written by another version of kvreclaim"
    for name, num_bytes in said["files"].items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != num_bytes:
            return f"lacks {name}, or a part of it"
    return None


def source_of(directory: Path) -> dict[str, Any] | None:
    """What a fetched model says of itself: layout, source and files; None where nothing does."""
    try:
        said = json.loads((directory / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return said if isinstance(said, dict) and isinstance(said.get("files"), dict) else None


def write_source(directory: Path, source: str) -> None:
    """Say of a directory that it is whole: its files as they are now, made of this source."""
    files = {
        str(p.relative_to(directory)): p.stat().st_size for p in sorted(directory.rglob("*")) if p.is_file()
    }
    said = {"layout": LAYOUT, "source": source, "files": files}
    (directory / SOURCE_FILE).write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")


def num_bytes_of(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
