"""The parts of `make gpu`: what each runs, for how long at most, and why it cannot run here."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from kvreclaim.bench.plans import MODEL

ROOT = Path(__file__).parent.parent
PYTEST = ("-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider")
COMMAND = ("-c", "from kvreclaim.cli.main import app; app()", "bench")
SAMPLE = {"KVRECLAIM_TEST_SAMPLE": "1"}
COMPILED = {"TRITON_INTERPRET": "0"}
OPS = (
    "decode attention",
    "compact",
    "verifying attention",
    "prefill attention",
    "write",
    "gather",
    "surrogate",
    "column sums",
    "key norms",
    "triattention",
    "mixture",
)
VLLM_FILES = ("start", "oracle", "pool", "uneven", "v2", "uneven_v2", "async", "prefix", "scheduler")


def nothing() -> None:
    """No reason against running."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """arguments: of this Python; tests: whether it is a run of pytest, and else a benchmark with --json;
    missing: why it cannot run here, or None."""

    name: str
    arguments: tuple[str, ...]
    limit_s: float
    tests: bool = True
    environment: Mapping[str, str] = field(default_factory=dict)
    missing: Callable[[], str | None] = nothing

    def file(self, out: Path, suffix: str) -> Path:
        return out / (self.name.replace(":", "-").replace(" ", "-") + suffix)


def tests(name: str, *paths: str, limit_s: float, **variables: str) -> Part:
    arguments = (*PYTEST, "--continue-on-collection-errors", *paths)
    return Part(
        name=f"tests:{name}", arguments=arguments, limit_s=limit_s, environment={**COMPILED, **variables}
    )


def kernels(name: str, op: str, *arguments: str) -> Part:
    command = (*COMMAND, "kernels", "--device", "cuda", "--ops", op, "--rounds", "3", *arguments)
    return Part(name=f"bench:{name}", arguments=command, limit_s=120, tests=False, environment=COMPILED)


def vllm(name: str) -> Part:
    file = f"tests/vllm_plugin/test_vllm_{name}.py"
    return Part(
        name=f"vllm:{name}",
        arguments=(*PYTEST, "-c", "tests/vllm_plugin/pytest.ini", file),
        limit_s=240,
        missing=no_vllm,
    )


@cache
def no_vllm() -> str | None:
    if importlib.util.find_spec("vllm") is None:
        return "vLLM is not installed"
    done = subprocess.run([sys.executable, "-c", "import vllm"], capture_output=True, text=True, check=False)
    return f"vLLM cannot be imported: {done.stderr.strip().splitlines()[-1]}" if done.returncode else None


def no_model() -> str | None:
    return None if (ROOT / MODEL).is_dir() else f"{MODEL} is missing; `make {MODEL}` makes it"


def every_part() -> list[Part]:
    """By value: what shows most comes first."""
    engine = tuple(f"tests/engine/test_{name}.py" for name in ("families", "swap", "invariants"))
    decode = (*COMMAND, "decode", "--contexts", "1024,16384", "--batches", "1,8", "--systems", "full")
    moving = ("tests/ops/test_moving.py", "tests/ops/test_backend.py")
    return [
        tests("graphs", "tests/engine/test_graphs.py", *moving, limit_s=150),
        tests("triton", "tests/ops/triton", limit_s=400, **SAMPLE),
        *(kernels(op, op) for op in OPS[:2]),
        Part(name="bench:decode", arguments=decode, limit_s=180, tests=False, missing=no_model),
        tests("engine", *engine, limit_s=300, **SAMPLE, KVRECLAIM_TEST_DEVICE="cuda"),
        *(vllm(name) for name in VLLM_FILES),
        *(kernels(op, op) for op in OPS[2:]),
        kernels("reference", OPS[0], "--kernels", "reference"),
        tests("every case", "tests/ops/triton", limit_s=600),
    ]
