"""The log of a server of its own: while it serves, stderr holds JSON lines and nothing else."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import web
from steering import LIMIT_S, until

KVRECLAIM = Path(sys.executable).parent / "kvreclaim"
MARKER = "xyzzymarker"


def test_every_line_is_an_object_and_none_quotes_a_prompt(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("w") as stdout, err.open("w") as stderr:
        small = ("--num-blocks", "64", "--max-model-len", "256")
        command = [KVRECLAIM, "serve", "--model", "demo", "--port", "0", *small]
        process = subprocess.Popen(command, stdout=stdout, stderr=stderr)
    try:
        until(lambda: "at http://" in err.read_text() or process.poll() is not None)
        url = re.search(r"at (http://[\d.:]+)", err.read_text())[1]
        for path, body in (
            ("/v1/completions", {"model": "kvreclaim-demo", "prompt": MARKER, "max_tokens": 2}),
            ("/v1/completions", {"model": "kvreclaim-demo", "prompt": {"a": MARKER}}),
            ("/v1/messages", {"model": "kvreclaim-demo", "messages": MARKER, "max_tokens": 2}),
        ):
            web.post(url + path, json=body)
        until(lambda: err.read_text().count("kvreclaim.access") == 3)
        lines = [json.loads(line) for line in err.read_text().splitlines()]
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0
    finally:
        process.kill()
        process.wait()
    assert [line["status"] for line in lines if line["logger"] == "kvreclaim.access"] == [200, 400, 400]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert MARKER not in err.read_text()
    assert not out.read_text()
