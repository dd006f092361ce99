"""The commit as files, what is built from them, and the sdist."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SDIST_LIMIT_BYTES = 16 << 20
NEEDED = (
    "LICENSE",
    "README.md",
    "csrc/CMakeLists.txt",
    "csrc/kernels.cmake",
    "src/kvreclaim/build.json",
    "src/kvreclaim/py.typed",
    "src/kvreclaim/assets/SmolLM2-135M-Instruct.safetensors",
    "src/kvreclaim/assets/demo_model/model.safetensors",
)
UNWANTED = ("tests/", "benchmarks/", "scripts/", ".ci/", "bench_models/")


@dataclass(frozen=True)
class Source:
    """One commit laid out in `folder`; nothing that git does not know gets into a release."""

    folder: Path
    commit: str
    epoch: str
    """Seconds since 1970 of the commit: the time of every file in every artefact."""

    @property
    def version(self) -> str:
        return tomllib.loads((self.folder / "pyproject.toml").read_text())["project"]["version"]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SOURCE_DATE_EPOCH": self.epoch}


def export(folder: Path) -> Source:
    """HEAD in `folder`, with the file that `kvreclaim --version` reads the commit from."""
    commit, epoch = _git("log", "-1", "--format=%H %ct").split()
    if _git("status", "--porcelain", "--untracked-files=no"):
        print("Changes that are not committed are not in this release.")
    folder.mkdir(parents=True)
    archive = folder.with_suffix(".tar")
    _git("archive", "--output", str(archive), "HEAD")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    archive.unlink()
    (folder / "src" / "kvreclaim" / "build.json").write_text(json.dumps({"commit": commit}) + "\n")
    return Source(folder, commit, epoch)


def make_sdist(source: Source, out: Path, python: Path) -> Path:
    command = [str(python), "-m", "build", "--sdist", "--outdir", str(out), str(source.folder)]
    subprocess.run(command, check=True, env=source.environment, stdout=subprocess.DEVNULL)
    (made,) = out.glob("*.tar.gz")
    _check_contents(made)
    return made


def _check_contents(sdist: Path) -> None:
    """Raises: SystemExit if it lacks what an installation needs, or has what none does."""
    with tarfile.open(sdist) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    missing = [name for name in NEEDED if name not in names]
    extra = [name for name in names if name.startswith(UNWANTED) or name.endswith(".so")]
    if missing or extra or sdist.stat().st_size > SDIST_LIMIT_BYTES:
        raise SystemExit(f"{sdist.name} lacks {missing}, has {extra[:5]} too much, or is over 16 MiB.")


def _git(*arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()
