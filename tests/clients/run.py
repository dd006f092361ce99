"""Starts a server, lets every client talk to it, and prints what each came to: `make clients`.

python tests/clients/run.py [--model DIR] [--only TEXT] [--env .clients-env]

Exit status 1 if a row is not ok.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvreclaim import demo_model, real_model

HERE = Path(__file__).parent
MODULES = ("openai_rows", "anthropic_rows", "framework_rows", "tool_rows")
NAME = "served-model"
PATIENCE_S, LIMIT_S = 900.0, 1800.0


@contextmanager
def serving(model: str, log: Path) -> Iterator[str]:
    """The address of a server of the model. Raises: RuntimeError where it does not start."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url, started = f"http://127.0.0.1:{port}", time.monotonic()
    command = [Path(sys.executable).parent / "kvreclaim", "serve", "--model", model, "--port", str(port)]
    with log.open("wb") as stream:
        process = subprocess.Popen([*command, "--served-model-name", NAME], stdout=stream, stderr=stream)
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


def commands(env: Path, url: str, model: str) -> Iterator[list[str]]:
    for module in MODULES:
        yield [str(env / "bin" / "python"), str(HERE / f"{module}.py"), url, NAME, model]
    if shutil.which("node") and (env / "node_modules").is_dir():
        shutil.copy(HERE / "node_rows.mjs", env / "node_rows.mjs")
        yield ["node", str(env / "node_rows.mjs"), url, NAME]


def rows_of(command: list[str]) -> Iterator[tuple[str, str, str]]:
    """What each row came to, as it comes."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "any"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("["):
                client, what, answer = json.loads(line)
                yield client, what, answer
        assert process.stderr is not None
        if process.wait(LIMIT_S):
            yield Path(command[1]).name, "the whole file", process.stderr.read().strip()[-300:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(real_model() or demo_model()))
    parser.add_argument("--only", default="", help="part of the files' names")
    parser.add_argument("--env", type=Path, default=Path(".clients-env"))
    given = parser.parse_args()
    failed = 0
    with (
        tempfile.TemporaryDirectory() as directory,
        serving(given.model, Path(directory) / "server.log") as url,
    ):
        print("| client | what | answer |\n|---|---|---|", flush=True)
        for command in commands(given.env, url, given.model):
            if given.only in command[1]:
                for client, what, answer in rows_of(command):
                    failed += answer != "ok"
                    print(f"| {client} | {what} | {answer} |", flush=True)
    print(f"{failed} rows are not ok" if failed else "every row is ok")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
