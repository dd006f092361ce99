"""Tests as a part of `make gpu`, and the plugin of pytest that writes a row with each test as it ends.

A failure that leaves CUDA unusable ends its process, since every later test would fail there: pytest-xdist
starts another one.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.__main__ import ROOT
from scripts.gpu.session import MOST_TEXT, Session

JOBS, BROKEN = "12", 77
PLUGINS = ("-p", "no:benchmark", "-p", "no:cacheprovider", "-p", "scripts.gpu.tests")
KERNELS = "tests/ops/triton/test_triton_"
FIRST = [f"{KERNELS}{name}.py" for name in ("packed", "engine", "gpu", "formats")]
FIRST += ["tests/engine/test_graphs.py", "tests/ops/test_moving.py"]
ENGINE = [f"tests/engine/test_{name}.py" for name in ("families", "swap", "invariants")]
ENGINE += ["-k", "not native and not every_format"]  # those take the native kernels of a CPU


def first(session: Session) -> None:
    """Files of which tests have failed on a GPU, and CUDA graphs."""
    run(session, FIRST)


def kernels(session: Session) -> None:
    """The other tests of kernels."""
    run(session, kernel_files())


def kernel_files() -> list[str]:
    files = (file.relative_to(ROOT) for file in ROOT.glob(f"{KERNELS}*.py"))
    return sorted({str(file) for file in files} - {*FIRST})


def engine(session: Session) -> None:
    """Engines on the device, against transformers."""
    run(session, ENGINE, KVRECLAIM_TEST_DEVICE=session.device)


def run(session: Session, paths: Sequence[str], **variables: str) -> None:
    """Become a process of pytest."""
    spread = ["-n", JOBS, "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
    options = ["-m", "pytest", *PLUGINS, "--continue-on-collection-errors", "--tb=short"]
    options += ["--gpu-out", str(session.out), "--gpu-part", session.part]
    options += FIRST[-1:] if session.is_tiny else [*spread, *paths]
    variables |= {"KVRECLAIM_TEST_SAMPLE": "1"}
    os.execve(sys.executable, [sys.executable, *options], {**os.environ, **variables})


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-out", type=Path)
    parser.addoption("--gpu-part")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config))


class Outcomes:
    """Writes rows, but for the workers of pytest-xdist: they send their reports to the first process."""

    def __init__(self, config: pytest.Config) -> None:
        self.session = Session(config.getoption("--gpu-out"), config.getoption("--gpu-part"))
        self.is_worker, self.has_failed = hasattr(config, "workerinput"), False

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._add(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed
        if report.when == "call" or not report.passed:
            self._add(report)

    def pytest_runtest_logfinish(self) -> None:
        if self.has_failed and cuda_is_broken():
            os._exit(BROKEN)

    def _add(self, report: Any) -> None:
        why, text = "", ""
        if report.failed:
            crash, text = getattr(report.longrepr, "reprcrash", None), report.longreprtext[-MOST_TEXT:]
            lines = (crash.message if crash else text).strip().splitlines() or [""]
            why = lines[0 if crash else -1][:300]
        elif isinstance(report.longrepr, tuple):
            why = report.longrepr[2].removeprefix("Skipped: ")
        if not self.is_worker:
            self.session.add(test=report.nodeid, outcome=report.outcome, why=why, text=text)


def cuda_is_broken() -> bool:
    """Whether torch uses CUDA in this process and can no longer."""
    torch = sys.modules.get("torch")
    try:
        return torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.synchronize())
    except RuntimeError:
        return True
