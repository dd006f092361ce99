"""Paths of fetched models, and checks that they are complete."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

REAL_MODEL = "SmolLM2-135M-Instruct"
"""The language model that `kvreclaim fetch` downloads by default."""

SOURCE_FILE = "kvreclaim_source.json"
"""Beside the weights of a fetched model: what it was made of, and its files with their sizes in bytes."""

STATS_FILE = "kvreclaim_stats.safetensors"
"""Statistics in a model's directory, read if a policy needs them and no file is named."""


def statistics_beside(model: str | os.PathLike[str]) -> Path:
    """Return the default path of a model's statistics: in its directory, or next to its GGUF file."""
    path = Path(model)
    return path.with_suffix(f".{STATS_FILE}") if path.suffix.lower() == ".gguf" else path / STATS_FILE


LAYOUT = 2
"""Version of the converted files; raised when a conversion writes other ones."""


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


def packed_home() -> Path:
    """Folder of copies of packed weights, a file for each GGUF file."""
    return _home() / "packed"


def stats_home() -> Path:
    """Folder of statistics that calibration keeps, a file for each model."""
    return _home() / "stats"


def ruler_home() -> Path:
    """Folder of RULER's rows that have been made."""
    return _home() / "ruler"


def history_file() -> Path:
    """Lines that were typed in `kvreclaim run`."""
    return _home() / "history"


def is_hub_gguf(name: str) -> bool:
    """Return whether it is owner/name:TYPE, the GGUF file of that type in a model of the hub."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+:\w+", name) is not None


def directory_name(hub_id: str) -> str:
    """Name of the directory of owner/name, or of owner/name:TYPE, a GGUF file."""
    return hub_id.replace("/", "--").replace(":", "--")


def fetched_model(name: str) -> Path | None:
    """Directory of a fetched model by its name or hub id, or its GGUF file if it is nothing more; None if it
    is not there."""
    directory = models_home() / directory_name(name)
    return (only_gguf(directory) or directory) if lacks(directory) is None else None


def only_gguf(directory: Path) -> Path | None:
    """The GGUF file that a model of the hub was fetched as; None for a directory that transformers reads."""
    return None if (directory / "config.json").is_file() else next(directory.glob("*.gguf"), None)


def real_model() -> Path | None:
    """Directory of the model that `kvreclaim fetch` downloads; None if it is not there."""
    return fetched_model(REAL_MODEL)


def real_gguf() -> Path | None:
    """Return the 4-bit GGUF file that real_model() was made from; None if it is not there."""
    directory = real_model()
    return None if directory is None else next(iter(directory.glob("*.gguf")), None)


def moved(made: Path, target: Path) -> bool:
    """Move a complete directory to its place; False if one is there already. Raises: OSError."""
    try:
        os.replace(made, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def shipped_statistics(name: str) -> Path:
    """Path of the shipped statistics of a model that `kvreclaim fetch` downloads."""
    return Path(__file__).parent / "assets" / f"{name}.safetensors"


def lacks(directory: Path) -> str | None:
    """Why a directory is no complete fetched model, as words after "it"; None if it is one."""
    contents = source_of(directory)
    if contents is None:
        return "was not written by `kvreclaim fetch`"
    if contents.get("layout") != LAYOUT:
        return "was written by another version of kvreclaim"
    for name, num_bytes in contents["files"].items():
        file = directory / name
        if not file.is_file() or file.stat().st_size != num_bytes:
            return f"lacks {name}, or a part of it"
    return None


def source_of(directory: Path) -> dict[str, Any] | None:
    """Return the source file of a fetched model: layout, source and files; None if there is none."""
    try:
        contents = json.loads((directory / SOURCE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return contents if isinstance(contents, dict) and isinstance(contents.get("files"), dict) else None


def write_source(directory: Path, source: str) -> None:
    """Mark a directory as complete, with its present files and the source."""
    files = {
        str(p.relative_to(directory)): p.stat().st_size for p in sorted(directory.rglob("*")) if p.is_file()
    }
    contents = {"layout": LAYOUT, "source": source, "files": files}
    (directory / SOURCE_FILE).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def num_bytes_of(directory: Path) -> int:
    """Bytes of all files below a directory."""
    return sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
