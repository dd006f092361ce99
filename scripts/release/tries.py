"""An artefact installed where there is no compiler, and used: versions, demo, a served request, a policy."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

COMPILERS = ("cc", "c++", "gcc", "g++", "clang", "clang++", "c99", "zig")
START_LIMIT_S = 300
DEMO_LIMIT_S = 1800


@dataclass(frozen=True)
class Outcome:
    """A row of the table that a release ends with."""

    artefact: str
    tag: str
    backend: str
    what: str
    result: str

    @property
    def is_good(self) -> bool:
        return self.result == "passed"


@dataclass(frozen=True)
class Place:
    """An environment of its own, in which PATH leads to its own programs alone."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "env" / "bin" / "python"

    @property
    def work(self) -> Path:
        return self.folder / "work"

    @property
    def environment(self) -> dict[str, str]:
        kept = {
            name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))
        }
        own = {
            "PATH": str(self.python.parent),
            "HOME": str(self.folder),
            "KVRECLAIM_HOME": str(self.folder / "home"),
        }
        return kept | own

    def run(self, *command: str | Path, limit_s: float = 600) -> str:
        """What it prints. Raises: RuntimeError with the end of it where it fails."""
        program = self.python.parent / command[0]
        done = subprocess.run(
            [program, *command[1:]],
            cwd=self.work,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=limit_s,
        )
        if done.returncode:
            raise RuntimeError(
                f"{command[0]} {command[1]} ended with {done.returncode}: {done.stdout[-3000:]}"
            )
        return done.stdout


def make_place(folder: Path, python: Path, torch: str, artefact: Path) -> Place:
    """An empty environment with torch and the artefact. Raises: RuntimeError if a compiler is in reach."""
    shutil.rmtree(folder, ignore_errors=True)
    place = Place(folder)
    place.work.mkdir(parents=True)
    subprocess.run([str(python), "-m", "venv", str(place.python.parents[1])], check=True)
    found = [name for name in COMPILERS if shutil.which(name, path=place.environment["PATH"])]
    if found:
        raise RuntimeError(f"the empty environment has a compiler: {found}")
    place.run("pip", "install", "--quiet", torch)
    place.run("pip", "install", "--quiet", artefact, limit_s=1200)
    return place


def try_version(place: Place, has_kernels: bool) -> str:
    """The back-end that it says. Raises: RuntimeError if that is not what the artefact promises."""
    told = place.run("kvreclaim", "--version")
    native = [line.split(": ", 1)[1] for line in told.splitlines() if "used on this CPU" in line]
    if bool(native) != has_kernels or "commit: unknown" in told:
        raise RuntimeError(f"--version says:\n{told}")
    return f"native ({native[0]})" if native else "reference"


def try_demo(place: Place) -> None:
    """All of it that needs no download."""
    place.run("kvreclaim", "demo", "--json", "demo.json", limit_s=DEMO_LIMIT_S)
    if not json.loads((place.work / "demo.json").read_text()):
        raise RuntimeError("the demo wrote no figures")


def try_serving(place: Place) -> None:
    """One request to a server that compresses, which then ends when asked to."""
    with _server(place) as url:
        body = {"model": "demo", "prompt": "a b c d e f g h", "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            usage = json.load(answer)["usage"]
        if not 1 <= usage["completion_tokens"] <= 8:
            raise RuntimeError(f"the server answered {usage}")


def try_policy(place: Place, examples: Path) -> None:
    """A package with a policy, installed beside ours, keeps the contract and runs."""
    package = place.folder / "policy"
    shutil.copytree(examples / "third_party_policy", package)
    place.run("pip", "install", "--quiet", "--no-deps", "--no-build-isolation", package)
    place.run("python", package / "try_it.py")


@contextmanager
def _server(place: Place) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [place.python.parent / "kvreclaim", "serve", "--model", "demo", "--port", str(port)]
    with (place.folder / "server.log").open("w") as log:
        server = subprocess.Popen(
            [*command, "--served-model-name", "demo"],
            cwd=place.work,
            env=place.environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _await(url, server)
            yield url
            server.send_signal(signal.SIGTERM)
            if server.wait(60) not in (0, -signal.SIGTERM):
                raise RuntimeError(f"the server ended with {server.returncode}")
        finally:
            server.kill()
            server.wait()


def _await(url: str, server: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + START_LIMIT_S
    while server.poll() is None and time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError("the server did not start; see server.log beside the environment")
