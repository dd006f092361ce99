"""Models in the cache directory, listed by `kvreclaim ls` and deleted by `kvreclaim rm`."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from kvreclaim.checks import is_int, require
from kvreclaim.cli.config_options import with_config
from kvreclaim.errors import InvalidArgumentError, KVReclaimError, printable
from kvreclaim.model.gguf_index import rope_scaling
from kvreclaim.model.position_limit import position_limit
from kvreclaim.model.quantized.copy_file import CopyFile, copy_files
from kvreclaim.model_paths import (
    SOURCE_FILE,
    directory_name,
    lacks,
    models_home,
    num_bytes_of,
    only_gguf,
    packed_home,
    source_of,
    statistics_beside,
)
from kvreclaim.temporary import left_over, remove_left_over, temporary_directory

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


COLUMNS = ("name", "size", "modified", "weights", "context", "statistics")


@with_config
def ls() -> None:
    """List the models in the cache directory: those of `kvreclaim fetch`, GGUF files, copies of packed
    weights, and what killed commands left over."""
    from kvreclaim.cli.policies import print_rows

    models = local_models()
    if not models:
        typer.echo(f"no model is in {models_home()}; `kvreclaim fetch` brings one", err=True)
        return
    rows = []
    for model in models:
        when = datetime.fromtimestamp(model.modified).strftime("%Y-%m-%d %H:%M")
        size, beside = f"{model.num_bytes / 1e6:,.0f} MB", "yes" if model.has_statistics else "no"
        rows.append(tuple(map(printable, (model.name, size, when, model.weights, model.context, beside))))
    print_rows(COLUMNS, rows)
    for model in models:
        if model.wrong is not None:
            typer.echo(printable(f"{model.name}: it {model.wrong}"), err=True)


@with_config
def rm(
    name: Annotated[str, typer.Argument(help="Name that `kvreclaim ls` prints, or the fetched hub id.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model that `kvreclaim fetch` wrote, with its statistics and the copies of its packed
    weights, or such a copy, or a GGUF file that cannot be read, or what a killed command left over."""
    model = deletable(name)
    size = f"{model.num_bytes / 1e6:,.0f} MB"
    if not yes and not typer.confirm(printable(f"Delete {model.path} ({size})?"), err=True):
        typer.echo("nothing is deleted", err=True)
        raise typer.Exit(1)
    try:
        _delete(model)
    except OSError as error:
        raise InvalidArgumentError(
            f"{str(model.path)!r} cannot be deleted ({error.strerror}); see to the rights of its folder."
        ) from error
    typer.echo(printable(f"{model.name}: {size} freed"))


def _delete(model: LocalModel) -> None:
    """Raises: OSError."""
    if model.is_left_over:
        remove_left_over(model.path.parent)
        return
    if not model.is_fetched:
        model.path.unlink()
        return
    copies = [each for each in copy_files() if each.source.is_relative_to(model.path.resolve())]
    with temporary_directory(models_home(), "rm") as made:
        os.replace(model.path, os.path.join(made, "model"))  # it goes whole, or not at all
    for copy in copies:
        copy.path.unlink(missing_ok=True)


def deletable(name: str) -> LocalModel:
    """Raises: InvalidArgumentError for all that kvreclaim did not write and can read."""
    models = {each: model for model in local_models() for each in (printable(model.name), model.name)}
    model = models.get(name) or models.get(directory_name(name))
    fetched = ", ".join(each.name for each in models.values() if each.is_fetched) or "none"
    require(
        model is not None,
        f"{name!r} is no model in {str(models_home())!r}, and nothing else is deleted; fetched models are: "
        f"{fetched}.",
        "name",
    )
    assert model is not None
    require(
        model.is_fetched or model.is_copy or model.is_damaged or model.is_left_over,
        f"{str(model.path)!r} is no directory that `kvreclaim fetch` wrote, so it is not deleted; fetched "
        f"models are: {fetched}.",
        "name",
    )
    return model
