"""`kvreclaim bench vllm`: tables, file and image, with a stand-in for vLLM's interpreter."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

from kvreclaim import demo_model
from kvreclaim.bench import vllm_cost, vllm_pool
from kvreclaim.cli.main import app

runner = CliRunner()
STAND_IN = """#!{python}
import json, os, sys
plugin = os.environ["VLLM_PLUGINS"] == "kvreclaim" and {installed}
assert "KVRECLAIM_VLLM" not in os.environ
for line in sys.stdin:
    asked = json.loads(line)
    if asked["command"] == "load":
        option = asked["additional_config"]
        scheduler = "ReclaimScheduler" if option and plugin else "Scheduler"
        answer = {{"plugin": plugin, "scheduler": scheduler, "vocab_size": 512, "vllm": "0.32.0"}}
    else:
        steps = 400 if option else 1200
        line = [float(i) for i in range(1, steps + 1)]
        flat = [3.0] * steps
        answer = {{
            "elapsed_s": steps / 100, "cpu_s": steps / 100, "digest": str({digest}), "at_s": line,
            "running": flat, "waiting": flat, "blocks": flat, "preemptions": 0 if option else 5,
            "after_pass": 9, "decoding": 12, "left": 0, "reclaim": {{}},
        }}
    print(json.dumps(answer), flush=True)
"""


def stand_in(folder, *, installed=True, digest="1"):
    path = folder / "python"
    path.write_text(STAND_IN.format(python=sys.executable, installed=installed, digest=digest))
    path.chmod(0o755)
    return path


def bench(*arguments):
    given = ("--model", demo_model(), *arguments)
    return runner.invoke(app, ["bench", "vllm", *map(str, given)])


def test_it_prints_the_tables_and_writes_file_and_image(tmp_path):
    file, image = tmp_path / "out.json", tmp_path / "pool.png"
    python = stand_in(tmp_path)
    more = ("--starts", 1, "--rounds", 2, "--plot", image, "--json", file)
    result = bench("--cases", "small,cost", "--vllm-python", python, *more)
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    without, with_plugin = report["rows"]
    assert (without["system"], with_plugin["system"]) == (vllm_pool.WITHOUT, vllm_pool.WITH)
    assert with_plugin["steps_ratio"] == 3
    assert with_plugin["speed_ratio"] == pytest.approx(3)
    assert with_plugin["budget"] == 256
    assert with_plugin["tokens_per_s"] == pytest.approx(4000 / 4)
    assert report["versions"]["vllm"] == "0.32.0"
    lines = result.stdout.splitlines()
    for made in (vllm_pool.pool_table(report["rows"]), vllm_cost.cost_table(report["cost"])):
        assert {*made.splitlines()} <= {*lines}
        assert len(made.splitlines()) > 3
    assert "1,200" in result.stdout
    assert "400 (3.00 x fewer)" in result.stdout
    assert {row["engine"]: row["rounds"] for row in report["cost"]} == {
        vllm_cost.AGAIN: 2,
        vllm_cost.INSTALLED: 2,
        vllm_cost.UNREACHED: 2,
    }
    assert image.read_bytes().startswith(b"\x89PNG")


def test_an_environment_without_the_plugin_is_refused(tmp_path):
    result = bench("--cases", "small", "--vllm-python", stand_in(tmp_path, installed=False))
    assert result.exit_code == 2
    assert "does not load kvreclaim's plugin" in result.stderr


def test_engines_that_draw_other_tokens_are_an_error(tmp_path):
    python = stand_in(tmp_path, digest="plugin")
    result = bench("--cases", "cost", "--starts", 1, "--rounds", 1, "--vllm-python", python)
    assert isinstance(result.exception, RuntimeError)
    assert "different tokens" in str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(("--cases", "tiny"), "--cases"), (("--vllm-python", "nowhere"), "make vllm-env")],
)
def test_a_mistake_is_said_in_one_sentence(arguments, said):
    result = bench(*arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert said in result.stderr


def test_a_timeline_keeps_its_ends():
    names = ("at_s", "running", "waiting", "blocks")
    whole = {name: list(range(1000)) for name in names}
    thin = vllm_pool.thin(whole, points=10)
    assert thin["at_s"] == [0, 111, 222, 333, 444, 555, 666, 777, 888, 999]
    assert vllm_pool.thin({name: [7] for name in names})["blocks"] == [7]
    short = {name: [1, 2, 3] for name in names}
    assert vllm_pool.thin(short, points=10) == short


def test_the_interval_holds_the_median():
    spread = vllm_cost.spread_of([float(value) for value in range(1, 31)])
    assert spread["median"] == 15.5
    assert spread["interval"] == [10.0, 21.0]  # ranks of 95 % for thirty values, binomial tables
    assert vllm_cost.spread_of([2.0])["interval"] == [2.0, 2.0]
