"""What kvreclaim does on a CUDA device, in one run of minutes: what shows most comes first.

    make gpu                                     # without a network: python3 -m scripts.gpu
    python -m scripts.gpu --tiny --out DIR       # every part at toy sizes on a CPU, in Triton's interpreter

Each part is a process with a time limit of its own. OUT/session.jsonl gets a row with each measurement and
each test that ends, OUT/session.log what the parts print, OUT/gpu.md the tables, anew after each part. A part
that fails or takes too long ends alone. Ends with 1 if one did, with 2 if there is no CUDA device.

This module imports Python's own library only. The parts run on packages of this Python; what it lacks of
.gpu-wheels (`make gpu-wheels`) is installed into build/gpu, where compiled kernels are kept, too.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).parent.parent.parent
WHEELS, WORK = ROOT / ".gpu-wheels", ROOT / "build" / "gpu"
SITE = WORK / "site"
PARTS = {
    "facts": ("kernels:facts", 25.0),
    "first tests": ("tests:first", 90.0),
    "decode": ("engine:decode", 130.0),
    "kernels": ("kernels:kernels", 75.0),
    "peers": ("engine:peers", 50.0),
    "serve": ("engine:serve", 75.0),
    "kernel tests": ("tests:kernels", 60.0),
    "engine tests": ("tests:engine", math.inf),
}
"""In their order: module and function, seconds at most. The last part gets what is left."""
LIMIT_S = 570.0
"""Seconds for all parts together."""
LEAST_S = 10.0
"""No part starts with less time left."""
NO_GPU = 2


def is_installed(package: str) -> bool:
    try:
        return bool(version(package))
    except PackageNotFoundError:
        return False


def prepare() -> None:
    """Install the wheels of packages that this Python lacks, and kvreclaim's name and version if it is not
    installed. Raises: CalledProcessError after pip's message."""
    wheels = [str(file) for file in sorted(WHEELS.glob("*.whl")) if not is_installed(file.name.split("-")[0])]
    pip = ("pip", "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade")
    if wheels:
        subprocess.run([sys.executable, "-m", *pip, "--target", str(SITE), *wheels], check=True)
    if not is_installed("kvreclaim"):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        info = SITE / f"kvreclaim-{project['version']}.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        text = f"Metadata-Version: 2.1\nName: kvreclaim\nVersion: {project['version']}\n"
        (info / "METADATA").write_text(text, encoding="utf-8")


def environment(is_tiny: bool) -> dict[str, str]:
    """Variables of the parts' processes. An installed kvreclaim stays in front of the sources: it may have
    native kernels."""
    paths = [ROOT] if is_installed("kvreclaim") else [ROOT / "src", ROOT, SITE]
    given = {
        "PYTHONPATH": os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "TRITON_INTERPRET": "1" if is_tiny else "0",
        "TRITON_CACHE_DIR": str(WORK / "triton"),
        "HF_HUB_OFFLINE": "1",
        "KVRECLAIM_HOME": os.devnull,
    }
    return {**os.environ, **given, **({"CUDA_VISIBLE_DEVICES": ""} if is_tiny else {})}


def run_process(command: list[str], log: Path, limit_s: float, variables: dict[str, str]) -> tuple[str, str]:
    """Its state, and why it did not pass: the last line that it printed. Leaves no process behind."""
    with log.open("a+", encoding="utf-8", errors="replace") as out:
        start = out.tell()
        child = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT, env=variables, start_new_session=True
        )
        try:
            status = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return "stopped", f"its limit of {limit_s:.0f} s came first"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(start)
        last = (out.read().strip().splitlines() or ["no output"])[-1]
    return ("passed", "") if status == 0 else ("failed", f"status {status}: {last[:300]}")


def run(out: Path, limit_s: float, is_tiny: bool) -> int:
    """Run the parts. Returns: the exit status."""
    until, has_failed = monotonic() + limit_s, False
    out = out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    variables, module = environment(is_tiny), [sys.executable, "-m"]
    for part, (_, most_s) in PARTS.items():
        start = monotonic()
        state, why = "not run", f"the limit of {limit_s:.0f} s came first"
        if until - start >= LEAST_S:
            command = [*module, "scripts.gpu.session", part, str(out), *(["--tiny"] if is_tiny else [])]
            state, why = run_process(command, out / "session.log", min(until - start, most_s), variables)
        row = {"part": part, "state": state, "why": why, "elapsed_s": round(monotonic() - start, 1)}
        with (out / "session.jsonl").open("a", encoding="utf-8") as rows:
            rows.write(json.dumps(row) + "\n")
        print(f"{part}: {state} {why}".rstrip(), flush=True)
        if part == "facts" and why.startswith(f"status {NO_GPU}:"):
            return NO_GPU
        has_failed |= state != "passed"
        subprocess.run([*module, "scripts.gpu.page", str(out)], cwd=ROOT, env=variables, check=True)
    print(out / "gpu.md")
    return int(has_failed)


if __name__ == "__main__":
    given = argparse.ArgumentParser(prog="make gpu")
    given.add_argument("--out", type=Path, default=Path("gpu_out"), help="directory of the results")
    given.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all parts together")
    given.add_argument("--tiny", action="store_true", help="toy sizes on a CPU, in Triton's interpreter")
    options = given.parse_args()
    prepare()
    sys.exit(run(options.out, options.limit, options.tiny))
