"""A plugin of pytest: writes each test's outcome as it ends, and goes on where an earlier process stopped.

    PYTHONPATH=scripts pytest -p outcomes --outcomes FILE tests/...

FILE holds a line of JSON for each test that starts ({"test"}), for each that ends ({"test", "outcome", "why",
"text"}), and one with the number of tests. Tests with an outcome are not run again; the one that was running
when a process ended runs last. After a failure that leaves CUDA unusable the process ends with BROKEN, since
every later test would fail, too.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

BROKEN = 77
MOST_TEXT = 4000


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of a file; none where it is missing. One that a killed process cut off is left out."""
    found = []
    for line in file.read_text(encoding="utf-8").split("\n") if file.exists() else ():
        with suppress(json.JSONDecodeError):
            found.append(json.loads(line))
    return found


def write(file: Path, **line: Any) -> None:
    """Append a line; it begins anew behind one that was cut off."""
    with file.open("a", encoding="utf-8") as out:
        out.write("\n" + json.dumps(line))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, required=True, help="File of outcomes.")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Outcomes(config.getoption("--outcomes")))


class Outcomes:
    """known: outcomes of earlier processes by test, None for one that only started; worst: of the test that
    runs, the report that decides."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.known = {line["test"]: line.get("outcome") for line in read(file) if "test" in line}
        self.worst: Any = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        write(self.file, collected=len(items))
        left = [item for item in items if self.known.get(item.nodeid) is None]
        items[:] = sorted(left, key=lambda item: item.nodeid in self.known)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._end(report)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.worst = None
        write(self.file, test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or self.worst is None or (report.skipped and self.worst.passed):
            self.worst = report

    def pytest_runtest_logfinish(self) -> None:
        self._end(self.worst)
        if self.worst.failed and cuda_is_broken():
            pytest.exit("CUDA is unusable in this process", returncode=BROKEN)

    def _end(self, report: Any) -> None:
        text = report.longreprtext[-MOST_TEXT:] if report.failed else ""
        write(self.file, test=report.nodeid, outcome=report.outcome, why=why(report), text=text)


def why(report: Any) -> str:
    """One line; "" for a test that passed."""
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2].removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = (crash.message if crash else report.longreprtext).strip().splitlines() or [""]
    return lines[0 if crash else -1][:300]


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
