"""`bench serve`: ours beside the engine alone, and beside a stand-in for llama-server."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import tiny_gguf
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench import serve
from kvreclaim.cli.main import app

REAL = Path(".llamacpp-env/bin/python").absolute()
GRID = (
    "--prompt",
    12,
    "--output",
    6,
    "--rounds",
    1,
    "--threads",
    1,
    "--num-blocks",
    64,
    "--dtype",
    "float32",
)
NOWHERE = ("--llamacpp-python", "no/python")
LLAMA_SERVER = """#!{python}
import http.server, json, sys
options = dict(zip(sys.argv, sys.argv[1:]))
assert options["--parallel"] == "2" and options["--ctx-size"] == "512" and options["--cache-type-k"] == "q8_0"
class Page(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        self.answer(b"{{}}")
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/completion":
            return self.answer(json.dumps({{"tokens": [7] * body["n_predict"]}}).encode())
        count = body["max_tokens"] - {fewer}
        events = [{{"choices": [{{"text": "a"}}]}}] * count
        events.append({{"choices": [], "usage": {{"completion_tokens": count}}}})
        lines = [*map(json.dumps, events), "[DONE]"]
        self.send_response(200)
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for line in lines:
            data = ("data: " + line + "\\n\\n").encode()
            self.wfile.write(b"%x\\r\\n%s\\r\\n" % (len(data), data))
        self.wfile.write(b"0\\r\\n\\r\\n")
    def answer(self, body):
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(options["--port"])), Page).serve_forever()
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path / "home"))
    path = tmp_path / "tiny.gguf"
    tiny_gguf.write(path)
    return path


@pytest.fixture
def peer(tmp_path):
    """Makes the stand-in beside an interpreter: its options. fewer: tokens than max_tokens."""

    def make(fewer=0):
        (tmp_path / "python").touch()
        server = tmp_path / "llama-server"
        server.write_text(LLAMA_SERVER.format(python=sys.executable, fewer=fewer))
        server.chmod(0o755)
        return ("--peers", "llamacpp:q8_0", "--llamacpp-python", tmp_path / "python")

    return make


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", "serve", *map(str, arguments)])


def test_http_gives_the_engines_own_answers(tmp_path):
    out = tmp_path / "out.json"
    more = ("--streams", "1,2", "--arrivals", 2, "--policy", "streaming_llm")
    result = bench("--model", demo_model(), *GRID, *more, "--budget", 64, "--json", out)
    assert result.exit_code == 0, result.output
    one, two, load = json.loads(out.read_text())["rows"]
    assert [(row["streams"], row["other_answers"], row["system"]) for row in (one, two)] == [
        (1, 0, "kvreclaim"),
        (2, 0, "kvreclaim"),
    ]
    assert one["ratio"] == pytest.approx(one["http"] / one["offline"])
    assert (load["arrivals"], load["num_ttft"], two["num_ttft"]) == (2, 2, 2)


def test_a_peer_gets_the_same_in_turns(file, peer, tmp_path, monkeypatch):
    monkeypatch.setattr(serve, "_judge", lambda *_: [])
    out = tmp_path / "out.json"
    result = bench("--model", file, *peer(), *GRID, "--streams", 2, "--arrivals", 3, "--json", out)
    assert result.exit_code == 0, result.output
    ours, theirs, our_load, their_load = json.loads(out.read_text())["rows"]
    assert [row["system"] for row in (ours, theirs, our_load, their_load)] == [
        "kvreclaim",
        "llamacpp:q8_0",
    ] * 2
    assert theirs["times"] == pytest.approx(ours["http"] / theirs["http"])
    assert (theirs["num_ttft"], their_load["num_ttft"]) == (2, 3)
    assert our_load["requests_per_s"] == their_load["requests_per_s"]


def test_a_peer_with_other_tokens_is_not_measured(file, peer):
    result = bench("--model", file, *peer(), *GRID, "--streams", 2)
    assert result.exit_code == 2
    assert "llamacpp:q8_0: " in result.stderr
    assert "nothing was timed" in " ".join(result.stderr.split())


def test_a_peer_that_answers_too_little_is_not_measured(file, peer, monkeypatch):
    monkeypatch.setattr(serve, "_judge", lambda *_: [])
    result = bench("--model", file, *peer(fewer=1), *GRID, "--streams", 2)
    assert result.exit_code == 2
    assert "an answer has 5 tokens, not 6" in result.stderr


def test_what_cannot_be_is_refused(file, peer, tmp_path):
    refused = {
        "llama.cpp reads .gguf files": ("--model", demo_model(), *peer()),
        "which is no file; run `make llamacpp-env`": ("--model", file, "--peers", "llamacpp", *NOWHERE),
        "--peers": ("--model", file, "--peers", "ollama"),
    }
    for words, given in refused.items():
        result = bench(*given, *GRID)
        assert result.exit_code == 2, words
        assert words in " ".join(result.stderr.split())
    given = peer()
    (tmp_path / "llama-server").unlink()
    result = bench("--model", file, *given, *GRID)
    assert result.exit_code == 2
    assert "llama-server must be next to --llamacpp-python" in " ".join(result.stderr.split())
    (tmp_path / "llama-server").write_text("#!/bin/sh\necho no such model\nexit 3\n")
    (tmp_path / "llama-server").chmod(0o755)
    result = bench("--model", file, *given, *GRID)
    assert "`llama-server` ended (exit code 3" in " ".join(result.stderr.split())


@pytest.mark.skipif(
    not REAL.with_name("llama-server").is_file(), reason="`make llamacpp-env` has not been run"
)
def test_the_real_server(file):
    result = bench("--model", file, "--peers", "llamacpp", "--llamacpp-python", REAL, *GRID, "--streams", 2)
    assert result.exit_code == 0, result.output
