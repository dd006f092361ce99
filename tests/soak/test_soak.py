"""The soaks at a small size; `make soak soak-tiers` runs them with 10,000 requests and an attack."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def outcomes(program: str, *options: str) -> dict:
    """What it reports; it ends with 1 where an answer is not the one that its request gets alone."""
    command = [sys.executable, str(HERE / program), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("options", [["--blocks", "80", "--no-compression"], ["--thread"]], ids=" ".join)
def test_every_answer_is_the_one_that_it_gets_alone(options: list[str]) -> None:
    report = outcomes("serve.py", "--requests", "80", "--clients", "16", "--alone", *options)
    assert report["outcomes"]["finished, greedy, as alone"] > 25


def test_tiers_change_no_answer() -> None:
    """Most phases are killed."""
    report = outcomes("tiers.py", "--requests", "40")
    assert report["as alone, full"] > 10
    assert report["as alone, compressed"] + report["as alone, compressed at a place"] > 10
