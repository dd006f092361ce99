"""Tests as a part of `make gpu`: a row with each test as it ends, in as many processes as pytest-xdist gives.

It is a plugin of pytest, too. A failure that leaves CUDA unusable ends its process, since every later test
would fail there: pytest-xdist starts another one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.session import MOST_TEXT, Session

JOBS = "12"
BROKEN = 77
KERNELS = "tests/ops/triton/"
FIRST = (
    *(f"{KERNELS}test_triton_{name}.py" for name in ("packed", "engine", "gpu", "formats")),
    "tests/engine/test_graphs.py",
    "tests/ops/test_moving.py",
)
ENGINE = (
    *(f"tests/engine/test_{name}.py" for name in ("families", "swap", "invariants")),
    *("-k", "not native and not every_format"),  # those take the native kernels of a CPU
)


def first(session: Session) -> None:
    """Files of which tests have failed on a GPU, and CUDA graphs."""
    run(session, FIRST[-1:] if session.is_tiny else FIRST)


def kernels(session: Session) -> None:
    """The other tests of kernels."""
    others = sorted(file for file in map(str, Path(KERNELS).glob("test_*.py")) if file not in FIRST)
    run(session, ["tests/ops/test_backend.py"] if session.is_tiny else others)


def engine(session: Session) -> None:
    """Engines on the device, against transformers."""
    files = ["tests/ops/formats/test_hadamard.py"] if session.is_tiny else ENGINE
    run(session, files, KVRECLAIM_TEST_DEVICE=session.device)


def run(session: Session, paths: Sequence[str], **variables: str) -> None:
    """Become a process of pytest."""
    options = ["-m", "pytest", "-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "scripts.gpu.tests"]
    options += ["--continue-on-collection-errors", "--tb=short"]
    options += ["--gpu-out", str(session.out), "--gpu-part", session.part]
    if importlib.util.find_spec("xdist") is not None and not session.is_tiny:
        options += ["-n", JOBS, "--dist", "worksteal"]
    variables |= {"KVRECLAIM_TEST_SAMPLE": "1"}
    os.execve(sys.executable, [sys.executable, *options, *paths], {**os.environ, **variables})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-out", type=Path)
    parser.addoption("--gpu-part")


def pytest_configure(config: pytest.Config) -> None:
    session = Session(config.getoption("--gpu-out"), config.getoption("--gpu-part"), False)
    config.pluginmanager.register(Watcher())
    if not hasattr(config, "workerinput"):  # of pytest-xdist, which sends its reports to the first process
        config.pluginmanager.register(Rows(session))


class Rows:
    """Writes the outcomes, in the process that collects them."""

    def __init__(self, session: Session) -> None:
        self.session = session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report, 0.0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._add(report, report.duration)

    def _add(self, report: Any, elapsed_s: float) -> None:
        row = {"test": report.nodeid, "outcome": report.outcome, "elapsed_s": round(elapsed_s, 2)}
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            lines = (crash.message if crash else report.longreprtext).strip().splitlines() or [""]
            row |= {"why": lines[0 if crash else -1][:300], "text": report.longreprtext[-MOST_TEXT:]}
        elif report.skipped and isinstance(report.longrepr, tuple):
            row["why"] = report.longrepr[2].removeprefix("Skipped: ")
        self.session.add(**row)


class Watcher:
    """Ends a process that can no longer use CUDA, when the outcome of its test is known."""

    has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed

    def pytest_runtest_logfinish(self) -> None:
        if self.has_failed and cuda_is_broken():
            os._exit(BROKEN)


def cuda_is_broken() -> bool:
    """Whether torch uses CUDA in this process and can no longer."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
