"""Scripts and types as their users meet them: the types of an installed package, the runner of vLLM's tests,
the port to a newer vLLM."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_a_client_sees_our_types(tmp_path):
    client = tmp_path / "client.py"
    client.write_text(
        "from kvreclaim import CompressionConfig, SamplingParams\n"
        "config = CompressionConfig(budget=384)\n"
        "reveal_type(config.budget)\n"
        "SamplingParams(temperature='hot')\n"
    )
    # From a folder of its own, as a user's project finds an installed package; torch's types take a minute.
    config = tmp_path / "mypy.ini"
    skipped = "".join(
        f"[mypy-{name}.*]\nfollow_imports = skip\n" for name in ("torch", "transformers", "numpy")
    )
    config.write_text("[mypy]\nfollow_imports = silent\nignore_missing_imports = true\n" + skipped)
    command = [sys.executable, "-m", "mypy", "--config-file", str(config), "--cache-dir", str(tmp_path / "c")]
    environment = {"PATH": "/usr/bin", "MYPYPATH": "", "PYTHONPATH": ""}
    output = subprocess.run(
        [*command, str(client)], cwd=tmp_path, env=environment, capture_output=True, text=True
    ).stdout
    assert "Revealed type is" in output
    assert "int" in output.splitlines()[0], output
    assert 'incompatible type "str"; expected "float' in output
    assert "py.typed" not in output


SCRIPT = Path(__file__).parent.parent / "scripts" / "test_vllm_file"


@pytest.mark.parametrize(
    ("python", "limit_s", "ending"),
    [
        ("echo 3 passed", 600, "ok "),
        ("exit 1", 600, "(status 1)"),
        ("kill -SEGV $$", 600, "(killed by SIGSEGV)"),
        ("kill -ABRT $$", 600, "(killed by SIGABRT)"),
        ("kill -KILL $$", 600, "(killed by SIGKILL)"),
        ("exec sleep 600", 1, "(time limit)"),
    ],
)
def test_how_a_file_ended_is_printed(python: str, limit_s: int, ending: str, tmp_path: Path):
    fake = tmp_path / ".vllm-env" / "bin" / "python"
    fake.parent.mkdir(parents=True)
    fake.write_text(f"#!/bin/sh\necho its output\n{python}\n")
    fake.chmod(0o755)
    given = os.environ | {"VLLM_TEST_LIMIT_S": str(limit_s)}
    ran = subprocess.run([SCRIPT, "tests/any.py"], cwd=tmp_path, env=given, capture_output=True, text=True)
    assert ending in ran.stdout.splitlines()[-1]
    assert (ran.returncode == 0) == (ending == "ok ")
    assert ("its output" in ran.stdout) == (ending != "ok ")


NEWER_SCRIPT = Path(__file__).parent.parent / "scripts" / "newer_vllm.py"
OLDER = """
  ops.def("silu_and_mul(Tensor! out, Tensor input) -> ()");
  ops.def(
      "attend(Tensor query, "
      "float scale) -> ()");
  ops.def("quantize() -> ()", placeholder_op);
"""
NEWER = """
  ops.def(
      "silu_and_mul(Tensor! out, Tensor input) "
      "-> ()");
  ops.def("attend(Tensor query, float scale) -> ()");
  ops.def("quantize(Tensor! result) -> ()");
"""


def test_declarations_are_compared_and_not_their_lines(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("newer_vllm", NEWER_SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, text in (("older", OLDER), ("newer", NEWER)):
        bindings = tmp_path / name / "csrc" / "cpu" / "torch_bindings.cpp"
        bindings.parent.mkdir(parents=True)
        bindings.write_text(text)
    older, newer = (script._declared(tmp_path / name) for name in ("older", "newer"))
    assert len(older) == len(newer) == 3
    assert newer - older == {"quantize(Tensor! result) -> ()"}
