"""`kvreclaim bench vllm --cases serve`: turns and ratios, with a stand-in for `vllm serve` and its client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench import vllm_serve
from kvreclaim.bench.systems import vllm_server
from kvreclaim.cli.main import app

STAND_IN = """#!{python}
import http.server, json, os, signal, sys, time
folder = {folder!r}
words = sys.argv[1:]
assert words[:2] == ["-m", "vllm.entrypoints.cli.main"]
options = dict(zip(words, words[1:]))
plugin = os.environ["VLLM_PLUGINS"] == "kvreclaim"
state = os.path.join(folder, "state-%d" % plugin)
if words[2] == "serve":
    assert ("--additional-config" in options) is plugin
    assert not any(name.startswith("kvreclaim_stats") for name in os.listdir(words[3]))
    with open(os.path.join(folder, "served-%d.json" % plugin), "w") as file:
        json.dump(options, file)
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            runs = os.path.exists(state)
            count = len(open(state).read()) if runs else 0
            text = 'vllm:kv_cache_usage_perc{{engine="0"}} %f\\n' % (0.5 if plugin else 1)
            text += "vllm:num_requests_running %d\\n" % (count > 0)
            text += "vllm:num_preemptions_total %d\\n" % (0 if plugin else count)
            if plugin and {installed}:
                text += "kvreclaim_blocks_freed_total{{engine=\\"0\\"}} %d\\n" % (100 * count)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"" if self.path == "/health" else text.encode())
        def log_message(self, *_):
            pass
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    http.server.HTTPServer(("127.0.0.1", int(options["--port"])), Page).serve_forever()
assert words[2:4] == ["bench", "serve"]
if options["--num-prompts"] != "1":
    with open(state, "a") as file:
        file.write("x")
    with open(os.path.join(folder, "clients.jsonl"), "a") as file:
        file.write(json.dumps([plugin, words]) + "\\n")
    time.sleep(0.3)
seed = int(options["--seed"])
speed = (2 + seed) if plugin else 1
result = {{"completed": 12, "output_throughput": 50.0 * speed, "duration": 9.0}}
result["request_goodput"] = {goodput} * speed
for name in ("ttft", "tpot", "e2el"):
    result |= {{"median_%s_ms" % name: 1000.0 / speed, "p99_%s_ms" % name: 2000.0 / speed}}
with open(os.path.join(options["--result-dir"], options["--result-filename"]), "w") as file:
    json.dump(result, file)
"""


def bench(folder: Path, *arguments: object, installed: bool = True, goodput: float = 0.1):
    python = folder / "python"
    python.write_text(
        STAND_IN.format(python=sys.executable, folder=str(folder), installed=installed, goodput=goodput)
    )
    python.chmod(0o755)
    given = ("--model", demo_model(), "--vllm-python", python, "--cases", "serve", *arguments)
    return CliRunner().invoke(app, ["bench", "vllm", *map(str, given)])


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(vllm_server, "SAMPLE_S", 0.02)


def test_both_sides_get_the_same_in_turns(tmp_path):
    file = tmp_path / "out.json"
    result = bench(tmp_path, "--policy", "knorm", "--turns", 3, "--rate", 2.5, "--json", file)
    assert result.exit_code == 0, result.output
    without, ours = json.loads(file.read_text())["serve"]
    assert vllm_serve.serve_table([without, ours]) in result.stdout
    for row in (without, ours):
        assert [turn["seed"] for turn in row["turns"]] == [0, 1, 2]
    for name in ("speed_ratio", "goodput_ratio"):
        assert ours[name] == pytest.approx(median([2, 3, 4]))
    assert "150.0 (3.00 x)" in result.stdout
    assert (without["preemptions"], ours["preemptions"], ours["blocks_freed"]) == (1, 0, 100)
    assert (without["mean_blocks"], ours["mean_blocks"]) == (128, 64)
    assert (ours["policy"], without["policy"]) == ("knorm", None)
    clients = [json.loads(line) for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    assert [plugin for plugin, _ in clients] == [False, True, True, False, False, True]
    for (_, first), (_, second) in zip(clients[::2], clients[1::2], strict=True):
        differ = {"--base-url", "--result-dir", "--tokenizer"}
        pairs = zip(first, first[1:], second[1:], strict=False)
        assert {name for name, a, b in pairs if a != b} <= differ
    words = clients[0][1]
    assert words[words.index("--goodput") + 1 :][:2] == ["ttft:10000", "tpot:200"]
    served = [json.loads((tmp_path / f"served-{side}.json").read_text()) for side in (0, 1)]
    for name in ("--num-gpu-blocks-override", "--block-size", "--max-model-len", "--max-num-batched-tokens"):
        assert served[0][name] == served[1][name]
    option = json.loads(served[1]["--additional-config"])["kv_compression"]
    assert (option["policy"], option["budget"]) == ("knorm", 256)


def test_no_goodput_has_no_ratio(tmp_path):
    result = bench(tmp_path, "--policy", "knorm", "--turns", 1, goodput=0.0)
    assert result.exit_code == 0, result.output
    assert " 0.000 | 100.0 (2.00 x)" in result.stdout


def test_an_environment_without_the_plugin_is_refused(tmp_path):
    result = bench(tmp_path, "--policy", "knorm", installed=False)
    assert result.exit_code == 2
    assert "does not load kvreclaim's plugin" in result.stderr


def test_real_text_is_cut_to_the_load(tmp_path, real_dir):
    plan = vllm_serve.VllmPlan(model=real_dir, python=tmp_path, prompts="text")
    with vllm_serve._without_statistics(real_dir) as model, vllm_serve._texts(plan, model) as file:
        assert not (model / "kvreclaim_stats.safetensors").exists()
        assert (model / "config.json").is_file()
        entries = json.loads(file.read_text())
    assert len(entries) > 4 * vllm_serve.LOAD.requests
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(real_dir)
    for entry in entries[:10]:
        prompt, answer = (len(tokenizer(part["value"]).input_ids) for part in entry["conversations"])
        assert abs(prompt - vllm_serve.LOAD.prompt) <= 8
        assert 0.66 <= answer / vllm_serve.LOAD.output <= 1.34
        assert prompt + answer <= vllm_serve.LOAD.longest


@pytest.mark.parametrize("goodput", ["ttft", "ttft:0", "itl:5", "ttft:1.5", "ttft:1,x:2"])
def test_objectives_that_are_none(tmp_path, goodput):
    result = bench(tmp_path, "--goodput", goodput)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --goodput has ")
