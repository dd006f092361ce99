"""Starts a server, lets every client talk to it, and prints what each came to: `make clients`.

python tests/clients/run.py [--model DIR] [--only TEXT] [--env .clients-env]

Exit status 1 if a row is not ok, or if none is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvreclaim import demo_model, real_model

HERE = Path(__file__).parent
NODE = "node_rows.mjs"
AGENTS = "agent_rows.py"
FILES = ("openai_rows.py", "anthropic_rows.py", "framework_rows.py", "tool_rows.py", NODE, AGENTS)
BUDGET = ("--kv-budget", "20%", "--kv-compression-calibrate")
"""Options of a second server, for sessions of agents."""
WHOLE, SKIPPED = "the whole file", "skipped"
NAME = "served-model"
PATIENCE_S, LIMIT_S = 900.0, 1800.0


@contextmanager
def serving(model: str, log: Path, options: Sequence[str] = ()) -> Iterator[str]:
    """The address of a server of the model. Raises: RuntimeError where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    command = [Path(sys.executable).parent / "kvreclaim", "serve", "--model", model, "--port", str(port)]
    command += ["--served-model-name", NAME, *options]
    with log.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream, stderr=stream)
        try:
            while not _answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() - started > PATIENCE_S:
                    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
                time.sleep(0.5)
            yield url
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(url, timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def command_of(name: str, env: Path, url: str, model: str) -> list[str] | None:
    """What runs a file of rows; None: Node or its packages are missing."""
    if name != NODE:
        return [str(env / "bin" / "python"), str(HERE / name), url, NAME, model]
    if not (shutil.which("node") and (env / "node_modules").is_dir()):
        return None
    shutil.copy(HERE / NODE, env / NODE)
    return ["node", str(env / NODE), url, NAME]


def rows_of(command: list[str], limit_s: float = LIMIT_S) -> Iterator[tuple[str, str, str]]:
    """What each row came to, as it comes; one more where the file ends badly or has no rows."""
    rows = 0
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True) as process,
    ):
        deadline = threading.Timer(limit_s, process.kill)
        deadline.daemon = True
        deadline.start()
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                rows += 1
                client, what, answer = json.loads(line)
                yield client, what, answer
        status = process.wait()
        deadline.cancel()
        if status or not rows:
            log.seek(0)
            ended = f"exit status {status} after {rows} rows (limit: {limit_s:.0f} s)"
            yield Path(command[1]).name, WHOLE, f"{ended}: {log.read().strip()[-300:]}"


def answers(names: list[str], env: Path, url: str, model: str) -> Iterator[tuple[str, str, str]]:
    for name in names:
        command = command_of(name, env, url, model)
        if command:
            yield from rows_of(command)
        else:
            yield name, WHOLE, f"{SKIPPED}: needs node and {env}/node_modules"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(real_model() or demo_model()))
    parser.add_argument("--only", default="", help=f"part of a file's name: {', '.join(FILES)}")
    parser.add_argument("--env", type=Path, default=Path(".clients-env"))
    given = parser.parse_args()
    names = [name for name in FILES if given.only in name]
    if not names:
        parser.error(f"--only {given.only!r} is part of no file's name: {', '.join(FILES)}")
    came: Counter[str] = Counter()
    print("| client | what | answer |\n|---|---|---|", flush=True)
    servers: list[tuple[Sequence[str], str, list[str]]] = [((), "", names)]
    if AGENTS in names:
        servers.append((BUDGET, ", 20 % of the bytes", [AGENTS]))
    for options, cache, served in servers:
        with (
            tempfile.TemporaryDirectory() as directory,
            serving(given.model, Path(directory) / "server.log", options) as url,
        ):
            for client, what, answer in answers(served, given.env, url, given.model):
                kind = next((each for each in ("ok", SKIPPED) if answer.startswith(each)), "not ok")
                came[kind] += 1
                print(f"| {client} | {what}{cache} | {answer} |", flush=True)
    print(f"rows: {came['ok']} ok, {came['not ok']} not ok, {came[SKIPPED]} skipped")
    return 0 if came["ok"] and not came["not ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
