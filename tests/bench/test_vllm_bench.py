"""`kvreclaim bench vllm`: turns, ratios, tables and image, with stand-ins for a server and a client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median

import pytest
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench import vllm_loads, vllm_plugin
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems import server_process, worker_process
from kvreclaim.cli.main import app

STAND_IN = """#!{python}
import http.server, json, os, signal, sys, time
folder = {folder!r}
words = sys.argv[1:]
assert words[:2] == ["-m", "vllm.entrypoints.cli.main"]
options = dict(zip(words, words[1:]))
plugin = os.environ["VLLM_PLUGINS"] == "kvreclaim"
side = plugin + 2 * ("--kv-cache-dtype" in options)
state = os.path.join(folder, "state-" + options.get("--port", options.get("--base-url", "")[-5:]))
if words[2] == "serve":
    assert ("--additional-config" in options) is plugin
    assert not any(name.startswith("kvreclaim_stats") for name in os.listdir(words[3]))
    with open(os.path.join(folder, "served-%d.json" % side), "w") as file:
        json.dump(options | {{"flags": words}}, file)
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            runs = os.path.exists(state)
            count = len(open(state).read()) if runs else 0
            text = 'vllm:kv_cache_usage_perc{{engine="0"}} %f\\n' % (0.5 if plugin else 1)
            text += "vllm:num_requests_running %d\\n" % (count > 0)
            text += "vllm:iteration_tokens_total_count %d\\n" % ((100 if plugin else 300) * count)
            text += "vllm:num_preemptions_total %d\\n" % (0 if plugin else {preempted} * count)
            if plugin and {installed}:
                text += "kvreclaim_blocks_freed_total{{engine=\\"0\\"}} %d\\n" % (100 * count)
                text += "kvreclaim_compactions_total %d\\n" % (10 * count)
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
result["total_output_tokens"] = {tokens} if plugin else 600
for name in ("ttft", "tpot", "itl", "e2el"):
    result |= {{"median_%s_ms" % name: 1000.0 / speed, "p99_%s_ms" % name: 2000.0 / speed}}
if "--save-detailed" in words:
    assert "--disable-shuffle" in words
    talks = [entry["conversations"] for entry in json.load(open(options["--dataset-path"]))]
    assert len(talks) == int(options["--num-prompts"])
    texts = [" %s, and so on" % answer["value"] for _, answer in talks]
    result["generated_texts"] = [texts[0].replace(",", "7,"), *texts[1:]] if plugin else texts
with open(os.path.join(options["--result-dir"], options["--result-filename"]), "w") as file:
    json.dump(result, file)
"""


def bench(folder: Path, *arguments: object, cases="serve", **changed):
    python = folder / "python"
    facts = {"installed": True, "goodput": 0.1, "preempted": 1, "tokens": 600} | changed
    python.write_text(STAND_IN.format(python=sys.executable, folder=str(folder), **facts))
    python.chmod(0o755)
    given = ("--model", demo_model(), "--vllm-python", python, "--cases", cases, *arguments)
    return CliRunner().invoke(app, ["bench", "vllm", *map(str, given)])


@pytest.fixture(autouse=True)
def _often(monkeypatch):
    monkeypatch.setattr(server_process, "SAMPLE_S", 0.02)


def test_both_sides_get_the_same_in_turns(tmp_path):
    file = tmp_path / "out.json"
    more = ("--budget", 320, "--turns", 3, "--rate", 2.5, "--json", file)
    result = bench(tmp_path, "--policy", "knorm", *more)
    assert result.exit_code == 0, result.output
    without, ours = json.loads(file.read_text())["rows"]
    assert vllm_plugin.plugin_table([without, ours]) in result.stdout
    for row in (without, ours):
        assert [turn["seed"] for turn in row["turns"]] == [0, 1, 2]
    for name in ("speed_ratio", "goodput_ratio"):
        assert ours[name] == pytest.approx(median([2, 3, 4]))
    assert "150.0 (3.00 x)" in result.stdout
    assert (without["preemptions"], ours["preemptions"], ours["blocks_freed"]) == (1, 0, 100)
    assert (without["steps"], ours["steps"], ours["steps_ratio"]) == (300, 100, pytest.approx(1 / 3))
    assert without["turns"][0]["timeline"]["blocks"][0] == 128
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
    assert (option["policy"], option["budget"]) == ("knorm", 320)


def test_a_side_with_fp8_has_as_many_bytes(tmp_path):
    file = tmp_path / "out.json"
    result = bench(tmp_path, "--turns", 1, "--kv-cache-dtype", "fp8", "--json", file)
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["system"] for row in rows] == ["vLLM", "vLLM, fp8", "vLLM + kvreclaim"]
    assert [row["num_blocks"] for row in rows] == [128, 256, 256]
    assert [row["mean_blocks"] for row in rows] == [128, 256, 128]
    assert [row["passes"] for row in rows] == [0, 0, 10]
    assert [row["goodput_ratio"] for row in rows] == [1, 1, 2]
    served = [json.loads((tmp_path / f"served-{side}.json").read_text()) for side in (0, 2, 3)]
    assert [each.get("--kv-cache-dtype") for each in served] == [None, "fp8", "fp8"]
    assert [each["--num-gpu-blocks-override"] for each in served] == ["129", "257", "257"]
    assert json.loads(served[2]["--additional-config"])["centred_keys"] is True


def test_no_goodput_has_no_ratio(tmp_path):
    result = bench(tmp_path, "--policy", "knorm", "--turns", 1, goodput=0.0)
    assert result.exit_code == 0, result.output
    assert " 0.000 | 100.0 (2.00 x)" in result.stdout


def test_an_environment_without_the_plugin_is_refused(tmp_path):
    result = bench(tmp_path, "--policy", "knorm", installed=False)
    assert result.exit_code == 2
    assert "does not load kvreclaim's plugin" in result.stderr


def test_all_cases_in_one_file_and_one_image(tmp_path):
    file, image = tmp_path / "out.json", tmp_path / "pool.png"
    more = ("--policy", "knorm", "--turns", 1, "--json", file, "--plot", image)
    result = bench(tmp_path, *more, preempted=0, cases="small,plenty")
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert [row["case"] for row in rows] == ["small", "small", "plenty", "plenty"]
    assert [row["budget"] for row in rows] == [None, 256, None, 256]
    assert [row["passes"] for row in rows] == [0, 10, 0, 10]
    assert image.read_bytes().startswith(b"\x89PNG")
    words = [json.loads(line)[1] for line in (tmp_path / "clients.jsonl").read_text().splitlines()]
    rates = [each[each.index("--request-rate") + 1] for each in words]
    assert rates == ["inf", "inf", "4.0", "4.0"]
    served = json.loads((tmp_path / "served-1.json").read_text())
    assert "--no-enable-prefix-caching" in served["flags"]  # a turn would find another's prompts
    assert "None" not in served["flags"]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"preempted": 1}, "a request was preempted"), ({"tokens": 599}, "different numbers of tokens")],
)
def test_sides_that_did_other_work_are_an_error(tmp_path, changed, reason):
    given = {"preempted": 0} | changed
    result = bench(tmp_path, "--policy", "knorm", "--turns", 1, cases="plenty", **given)
    assert isinstance(result.exception, RuntimeError)
    assert reason in str(result.exception)


def test_lookups_are_judged(tmp_path, real_dir):
    file = tmp_path / "out.json"
    more = ("--model", real_dir, "--policy", "knorm", "--turns", 2, "--prompts", "lookups", "--json", file)
    result = bench(tmp_path, *more)
    assert result.exit_code == 0, result.output
    without, ours = json.loads(file.read_text())["rows"]
    requests = vllm_loads.LOOKUPS.requests
    for turn in without["turns"]:
        assert turn["right"] == [True] * requests
        assert "generated_texts" not in turn
    assert ours["turns"][1]["right"] == [False] + [True] * (requests - 1)
    assert ours["right"] == 1 - 1 / requests
    assert f"| {ours['right']:.3f} |" in result.stdout


def texts(model: Path, folder: Path, prompts: str, turns: int = 2):
    plan = VllmPlan(model=model, python=Path(sys.executable), prompts=prompts, turns=turns)
    load = vllm_loads.LOOKUPS if prompts == "lookups" else vllm_loads.LOADS["serve"]
    linked = folder / "model"
    worker_process.link_model(model, linked)
    assert not (linked / "kvreclaim_stats.safetensors").exists()
    assert (linked / "config.json").is_file()
    made = vllm_loads.make_prompts(plan, load, linked, folder)
    assert len(made) == turns
    return load, [answers for _, answers in made], [json.loads(file.read_text()) for file, _ in made]


def lengths(model: Path, entry) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [len(tokenizer(part["value"]).input_ids) for part in entry["conversations"]]


def test_real_text_is_cut_to_the_load(tmp_path, real_dir):
    load, _, [entries, _] = texts(real_dir, tmp_path, "text")
    assert len(entries) > 4 * load.requests
    for entry in entries[:10]:
        prompt, answer = lengths(real_dir, entry)
        assert abs(prompt - load.prompt) <= 8
        assert 0.66 <= answer / load.output <= 1.34
        assert prompt + answer <= load.longest


def test_no_lookup_comes_twice_and_each_has_its_fact(tmp_path, real_dir):
    load, made, entries = texts(real_dir, tmp_path, "lookups")
    questions = [talk["value"] for turn in entries for talk, _ in (entry["conversations"] for entry in turn)]
    assert len(set(questions)) == 2 * load.requests
    for answers, turn in zip(made, entries, strict=True):
        assert len(answers) == len(turn) == load.requests
        for answer, entry in zip(answers, turn, strict=True):
            prompt, _ = (part["value"] for part in entry["conversations"])
            assert prompt.count(answer) == 1
            assert prompt.rstrip().endswith(("It weighs", "It is"))
    assert all(load.prompt - 48 <= lengths(real_dir, entry)[0] <= 1024 for entry in entries[0])


def test_an_answer_is_right_if_it_begins_with_the_right_one():
    found = vllm_loads.judged(
        [" 123 grams", "1234", "it is 123", "\n pen, pen"], ["123", "123", "123", "pen"]
    )
    assert found == [True, False, False, True]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [(("--cases", "tiny"), "--cases"), (("--vllm-python", "nowhere"), "make vllm-env")],
)
def test_a_mistake_is_one_sentence(tmp_path, arguments, named):
    result = bench(tmp_path, *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert named in result.stderr


@pytest.mark.parametrize("goodput", ["ttft", "ttft:0", "itl:5", "ttft:1.5", "ttft:1,x:2"])
def test_objectives_that_are_none(tmp_path, goodput):
    result = bench(tmp_path, "--goodput", goodput)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: --goodput has ")
