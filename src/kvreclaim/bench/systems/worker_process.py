"""Another engine in its own process and environment, controlled by one JSON object per line."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.base import Point, Session, SkipPoint, Slice, System
from kvreclaim.errors import InvalidArgumentError

ANSWER_TIMEOUT_S = 1800.0
LOOP = Path(__file__).with_name("worker_loop.py")


class WorkerProcess:
    """Sends commands and waits for answers. Its log is a temporary file.

    engine: its name for messages; worker: argument of worker_loop.py; option: sets its interpreter, made by
    `make TARGET`
    """

    engine: str
    worker: str
    option: str
    target: str

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        if not python.is_file():
            raise InvalidArgumentError(
                f"{self.option} is {str(python)!r}, which is no file; run `make {self.target}` and pass "
                f".{self.target}/bin/python, or leave {self.engine} out of --peers."
            )
        handle, name = tempfile.mkstemp(prefix=f"{self.target}-", suffix=".log")
        self.log, self.facts = Path(name), Row()
        self.process = subprocess.Popen(
            [str(python), str(LOOP), self.worker],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=handle,
            text=True,
            env=dict(environment),
        )
        os.close(handle)

    def ask(self, command: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **arguments: Any) -> Row:
        """Run a command. Raises: SkipPoint with the engine's own error, or when it died or took too long."""
        assert self.process.stdin is not None, "standard input is a pipe"
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
            answer: Row = json.loads(self._line(timeout_s))
        except (BrokenPipeError, json.JSONDecodeError) as error:
            self.close()
            raise SkipPoint(f"{self.engine}'s process ended ({self._log_tail()})") from error
        if "error" in answer:
            raise SkipPoint(f"{self.engine} failed: {answer['error']}")
        return answer

    def _line(self, timeout_s: float) -> str:
        stdout = self.process.stdout
        assert stdout is not None, "standard output is a pipe"
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            deadline = monotonic() + timeout_s
            while monotonic() < deadline:
                if selector.select(timeout=1.0):
                    return stdout.readline()
        self.process.kill()
        raise SkipPoint(f"{self.engine} gave no answer in {timeout_s:.0f} s")

    def _log_tail(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1][:200] if lines else "empty"
        return f"exit code {self.process.poll()}, log {self.log}: {last}"

    def close(self) -> None:
        """End the process."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it may have died with a command unread
                self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        if self.process.returncode == 0:
            self.log.unlink(missing_ok=True)


class Peer(System):
    """Answers from a process with known facts."""

    process: WorkerProcess

    def open(self, point: Point) -> PeerSession:
        return PeerSession(self.process, point)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        return list(self.process.ask("generate", prompts=prompts, max_tokens=max_tokens)["tokens"])

    def close(self) -> None:
        self.process.close()


class PeerSession(Session):
    """Sequences that stay in the other system's cache."""

    def __init__(self, process: WorkerProcess, point: Point) -> None:
        self.process = process
        answer = process.ask(
            "open",
            prompts=point.prompts(process.facts["vocab_size"]),
            max_tokens=point.max_len - point.context,
            synthetic=point.fill == "synthetic",
        )
        self.fill_s = float(answer["fill_s"])

    def run(self, steps: int) -> Slice:
        answer = self.process.ask("run", steps=steps)
        return Slice(steps, answer["tokens"], answer["elapsed_s"])

    def close(self) -> None:
        self.process.ask("close")
