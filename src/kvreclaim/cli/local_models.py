"""Models that lie in the cache directory, for `run`, `ls` and `rm`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvreclaim.checks import is_int
from kvreclaim.errors import KVReclaimError
from kvreclaim.model.gguf_index import rope_scaling
from kvreclaim.model.position_limit import position_limit
from kvreclaim.model.quantized.copy_file import CopyFile, copy_files
from kvreclaim.model_paths import (
    SOURCE_FILE,
    lacks,
    models_home,
    num_bytes_of,
    only_gguf,
    packed_home,
    source_of,
    statistics_beside,
)
from kvreclaim.temporary import left_over

UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A directory or GGUF file below models_home(), or a copy of a GGUF file's packed weights.

    name:        by which `run` and `rm` know it; `run` takes no copy
    modified:    seconds since 1970
    weights:     method and bits, ggml's type or the dtype; context: tokens
    is_fetched:  `kvreclaim fetch` wrote it
    is_copy:     a start made it, and the next one makes it again
    is_damaged:  a GGUF file that cannot be read, in no folder that a link leads to
    is_left_over: a killed command left it
    wrong:       why it cannot be used, as words after "it"
    """

    name: str
    path: Path
    num_bytes: int
    modified: float
    weights: str
    context: str
    has_statistics: bool
    is_fetched: bool
    wrong: str | None = None
    is_copy: bool = False
    is_damaged: bool = False
    is_left_over: bool = False


def local_models() -> list[LocalModel]:
    """Return all models by name; GGUF files in a directory follow it. Copies and left-overs are last."""
    home = models_home()
    entries = sorted(home.iterdir()) if home.is_dir() else []
    found = []
    for entry in entries:
        if entry.is_dir() and not entry.name.startswith("."):
            if source_of(entry) is not None and (file := only_gguf(entry)) is not None:
                model = _gguf(file)
                wrong = lacks(entry) or model.wrong
                own = not entry.is_symlink()
                found.append(replace(model, name=entry.name, path=entry, is_fetched=own, wrong=wrong))
                continue
            if (entry / "config.json").is_file() or source_of(entry) is not None:
                found.append(_directory(entry))
            found += [_gguf(file) for file in sorted(entry.rglob("*.gguf")) if file.is_file()]
        elif entry.suffix.lower() == ".gguf" and entry.is_file():
            found.append(_gguf(entry))
    left = [each for folder in (home, packed_home()) for each in left_over(folder)]
    return found + [_copy(each) for each in copy_files()] + [_left_over(each) for each in left]


def _directory(path: Path) -> LocalModel:
    is_fetched = source_of(path) is not None and not path.is_symlink()
    config = _config(path / "config.json")
    stamp = path / (SOURCE_FILE if is_fetched else "config.json")
    return LocalModel(
        name=path.name,
        path=path,
        num_bytes=num_bytes_of(path),
        modified=stamp.stat().st_mtime,
        weights=_weights(config),
        context=_context(config),
        has_statistics=statistics_beside(path).is_file(),
        is_fetched=is_fetched,
        wrong=lacks(path) if is_fetched else None,
    )


def _gguf(file: Path) -> LocalModel:
    from kvreclaim.model.gguf_index import has_gguf, read_index

    weights, context, wrong = "gguf", UNKNOWN, None
    try:
        index = read_index(file)
    except KVReclaimError as error:
        wrong = f"cannot be read: {error}"
    else:
        kinds = Counter[str]()
        for tensor in index.tensors.values():
            kinds[tensor.kind] += tensor.num_bytes
        weights = kinds.most_common(1)[0][0] if kinds else UNKNOWN
        kind = index.fields.get("general.architecture")
        config = {"model_type": kind, "max_position_embeddings": index.fields.get(f"{kind}.context_length")}
        context = _context(config, partial(rope_scaling, index.fields))
    about = file.stat()
    return LocalModel(
        name=str(file.relative_to(models_home())),
        path=file,
        num_bytes=about.st_size,
        modified=about.st_mtime,
        weights=weights,
        context=context,
        has_statistics=statistics_beside(file).is_file(),
        is_fetched=False,
        wrong=wrong,
        is_damaged=wrong is not None and has_gguf() and _is_inside(file.parent),
    )


def _copy(copy: CopyFile) -> LocalModel:
    return LocalModel(
        name=copy.name,
        path=copy.path,
        num_bytes=copy.num_bytes,
        modified=copy.used,
        weights="packed copy",
        context="-",
        has_statistics=False,
        is_fetched=False,
        is_copy=True,
    )


def _is_inside(folder: Path) -> bool:
    """Whether no link leads from models_home() to the folder."""
    return folder.resolve().is_relative_to(models_home().resolve())


def _left_over(path: Path) -> LocalModel:
    name = f"{path.parent.name}/{path.name}"
    return LocalModel(
        name=name,
        path=path,
        num_bytes=num_bytes_of(path) if path.is_dir() else path.stat().st_size,
        modified=path.stat().st_mtime,
        weights="left over",
        context="-",
        has_statistics=False,
        is_fetched=False,
        is_left_over=True,
        wrong=f"was left over by a command that was killed; `kvreclaim rm {name}` deletes it",
    )


def _config(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _weights(config: Mapping[str, Any]) -> str:
    """Storage of the weights by the config."""
    packed = config.get("quantization_config")
    if isinstance(packed, Mapping):
        bits = packed.get("bits") or (4 if packed.get("load_in_4bit") else None)
        return f"{packed.get('quant_method', UNKNOWN)}{f' {bits} bits' if bits else ''}"
    return str(_text_value(config, "dtype") or _text_value(config, "torch_dtype") or UNKNOWN).removeprefix(
        "torch."
    )


def _context(config: Mapping[str, Any], rotation: Callable[[], object] | None = None) -> str:
    """Tokens that the model is made for. rotation: its rope_parameters, where they are not in the config"""
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    known: Any = config.get("max_position_embeddings")
    try:
        config = config if rotation is None else {**config, "rope_parameters": rotation()}
        return str(position_limit(config, int(known)) if is_int(known) else known or UNKNOWN)
    except KVReclaimError:
        return str(known)


def _text_value(config: Mapping[str, Any], key: str) -> Any:
    """A field of the config, or of the language model's within it."""
    inner = config.get("text_config")
    return config.get(key) or (inner.get(key) if isinstance(inner, Mapping) else None)
