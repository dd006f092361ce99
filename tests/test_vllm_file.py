"""scripts/test_vllm_file: a crash is not a time limit. The environment's Python is a script here."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "test_vllm_file"


@pytest.mark.parametrize(
    ("python", "limit_s", "said"),
    [
        ("echo 3 passed", 600, "ok "),
        ("exit 1", 600, "(status 1)"),
        ("kill -SEGV $$", 600, "(killed by SIGSEGV)"),
        ("kill -ABRT $$", 600, "(killed by SIGABRT)"),
        ("kill -KILL $$", 600, "(killed by SIGKILL)"),
        ("exec sleep 600", 1, "(time limit)"),
    ],
)
def test_how_a_file_ended_is_said(python: str, limit_s: int, said: str, tmp_path: Path):
    fake = tmp_path / ".vllm-env" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(f"#!/bin/sh\necho its output\n{python}\n")
    fake.chmod(0o755)
    given = os.environ | {"VLLM_TEST_LIMIT_S": str(limit_s)}
    ran = subprocess.run([SCRIPT, "tests/any.py"], cwd=tmp_path, env=given, capture_output=True, text=True)
    assert said in ran.stdout.splitlines()[-1]
    assert (ran.returncode == 0) == (said == "ok ")
    assert ("its output" in ran.stdout) == (said != "ok ")
