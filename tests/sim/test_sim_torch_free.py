"""The simulator runs where torch is not installed."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from kvreclaim.cli.main import app
app(["simulate", "--gpu", "H100", "--requests", "3", "--rate", "2", "--json", sys.argv[1]])
"""


def test_simulate_needs_no_torch(tmp_path) -> None:
    out = tmp_path / "report.json"
    done = subprocess.run([sys.executable, "-W", "error", "-c", PROGRAM, str(out)], timeout=120)
    assert done.returncode == 0
    assert out.is_file()
