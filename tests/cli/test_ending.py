"""The command's process: it ends without an interpreter's clean-up, and loses nothing by that."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
from kvreclaim.cli import main
atexit.register(lambda: print("at exit"))
class Kept:
    def __del__(self): print("freed")
kept = Kept()
def slow():
    time.sleep(0.2)
    print("a thread's last word")
def app():
    threading.Thread(target=slow).start()
    print("said", end=" ")
    {end}
main.app = app
main.main()
"""


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONUNBUFFERED": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(("end", "code"), [("raise SystemExit", 0), ("sys.exit(0)", 0), ("sys.exit(3)", 3)])
def test_threads_end_and_callbacks_run_but_nothing_is_freed(end: str, code: int) -> None:
    done = run(PROGRAM.format(end=end))
    assert done.stdout.splitlines() == ["said a thread's last word", "at exit"]
    assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize(
    ("end", "message"),
    [("sys.exit('why not')", "why not\n"), ("raise RuntimeError('a bug')", "RuntimeError: a bug\n")],
)
def test_a_process_that_fails_says_so(end: str, message: str) -> None:
    done = run(PROGRAM.format(end=end))
    assert done.returncode == 1
    assert done.stderr.endswith(message)
    assert "at exit" in done.stdout


def test_output_without_a_reader_is_no_success() -> None:
    writing = "import sys; sys.stdout.write('x'); sys.exit(0)"
    program = f"""
import os, sys
from kvreclaim.cli import main
def app():
    reader, writer = os.pipe()
    os.dup2(writer, 1); os.close(writer); os.close(reader)
    {writing}
main.app = app
main.main()
"""
    done = run(program)
    assert done.returncode == 120  # the interpreter's own
    assert "BrokenPipeError" in done.stderr


@pytest.mark.parametrize(("arguments", "code"), [(("--version",), 0), (("generate", "--model", "demo"), 2)])
def test_the_command_itself(arguments: tuple[str, ...], code: int) -> None:
    done = run("from kvreclaim.cli.main import main; main()", *arguments)
    assert done.returncode == code
    assert ("kvreclaim" in done.stdout) == (code == 0)
