"""`kvreclaim serve` with the demo model in a process of its own; at its end every block must be back."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MODEL = "kvreclaim-demo"
ATTACKER, OTHER, OPERATOR = "key-of-the-attacker", "key-of-another", "key-of-the-operator"
KEYED = ["--api-key", ATTACKER, "--api-key", OTHER, "--operator-key", OPERATOR, "--log-format", "text"]
PATIENCE_S = 300.0


@dataclass(frozen=True)
class Target:
    """One server. keyed: whether it wants keys; log: its own output."""

    port: int
    pid: int
    log: Path
    keyed: bool = True

    def key(self, key: str) -> str | None:
        return key if self.keyed else None


@contextmanager
def serving(options: list[str], log: Path) -> Iterator[Target]:
    """Raises: RuntimeError where it does not start, or does not end well."""
    with log.open("wb") as stream:
        command = [sys.executable, __file__, "serve", "--model", "demo", "--port", "0", *options]
        process = subprocess.Popen(command, stderr=stream, stdout=stream)
    try:
        yield Target(_port(process, log), process.pid, log, "--api-key" in options)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    if code != 0:
        raise RuntimeError(f"the server ended with {code}:\n{log.read_text(errors='replace')[-4000:]}")


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := re.search(r"serving .* at http://[^ ]*:(\d+)", log.read_text(errors="replace")):
            return int(found[1])
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start:\n{log.read_text(errors='replace')[-2000:]}")


def main() -> None:
    """The server's process."""
    from kvreclaim.cli.main import app
    from kvreclaim.engine.serving.core import EngineCore
    from kvreclaim.server.entry import run

    class Checked(run.Server):
        async def shutdown(self, sockets: object = None) -> None:
            await self.service.engine.drained()
            await self.service.engine.call(EngineCore.check)
            await super().shutdown(sockets)

    run.Server = Checked
    app()


if __name__ == "__main__":
    main()
