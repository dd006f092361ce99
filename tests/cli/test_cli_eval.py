"""`kvreclaim eval` from the command line: files, exit codes, one sentence for a mistake, resuming."""

from __future__ import annotations

import csv
import json

import pytest
import tiny
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.eval.runner import BatchRunner

runner = CliRunner()
SMALL = ("--num-tokens", 200, "--interval", 16, "--recent", 8, "--num-examples", 3, "--batch-size", 2)


@pytest.fixture(scope="module")
def model(tiny_dir):
    return tiny_dir("llama")


def run(model, *arguments):
    base = ("eval", "--model", model, "--device", "cpu", *SMALL)
    return runner.invoke(app, [str(argument) for argument in (*base, *arguments)])


GRID = ("--policies", "full,knorm,segments(knorm)", "--budgets", "0.5,0.3", "--tasks", "agreement")


def test_a_grid_writes_its_files_and_prints_a_table(model, tmp_path):
    files = [tmp_path / f"figures.{kind}" for kind in ("json", "csv")]
    named = [part for file in files for part in (f"--{file.suffix[1:]}", file)]
    result = run(model, *GRID, *named, "--out", tmp_path / "out", "--seeds", "0,4")
    assert result.exit_code == 0, result.output
    content = json.loads(files[0].read_text())
    assert [(row["policy"], row["fraction"]) for row in content["rows"]] == [
        ("full", 1.0),
        *((policy, fraction) for policy in ("knorm", "segments(knorm)") for fraction in (0.5, 0.3)),
    ]
    assert all(row["num_examples"] == 6 and row["status"] == "ok" for row in content["rows"])
    assert content["header"]["seeds"] == [0, 4]
    with files[1].open(newline="") as file:
        assert [float(row["value"]) for row in csv.DictReader(file)] == [r["value"] for r in content["rows"]]
    for file in files:
        assert (tmp_path / "out" / f"report{file.suffix}").read_text() == file.read_text()
    assert "segments(knorm)" in result.stdout
    assert "agreement (6 examples" in result.stdout


def test_the_demo_model_speaks_its_own_tasks(tmp_path):
    arguments = ("--policies", "full,query_mixture", "--budgets", "0.4", "--tasks", "chain", "--recent", "16")
    sizes = ("--num-tokens", "512", "--interval", "32", "--num-examples", "2", "--free-running")
    result = runner.invoke(
        app, ["eval", "--model", "demo", *arguments, *sizes, "--json", str(tmp_path / "x.json")]
    )
    assert result.exit_code == 0, result.output
    full, ours = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert full["speed_of"] == ours["speed_of"] == "generation"
    assert set(full["extra"]) == {"exact_match", "progress"}
    assert sum(full["asked_at"]) > 0
    assert ours["blocks_freed"] > 0


def test_formats_are_compared_and_the_best_mix_is_printed(model, tmp_path):
    arguments = ("--policies", "full,knorm", "--budgets", "0.3", "--kv-cache-dtype", "fp32,fp8")
    result = run(model, *arguments, "--tasks", "agreement", "--json", tmp_path / "x.json")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / "x.json").read_text())
    assert [(row["policy"], row["kv_cache_dtype"]) for row in content["rows"]] == [
        *(("full", "fp32"), ("knorm", "fp32"), ("full", "fp8_e4m3"), ("knorm", "fp8_e4m3")),
    ]
    assert [each["name"] for each in content["header"]["kv_formats"]] == ["fp32", "fp8_e4m3"]
    assert "agreement: best mix for a byte budget" in result.stdout


def test_an_untrusted_cell_fails_the_command(model):
    result = run(model, "--policies", "full,knorm", "--budgets", "1", "--tasks", "agreement")
    assert result.exit_code == 1
    assert "no compression fired" in result.stdout


def test_a_refused_cell_does_not_unless_nothing_is_left(model):
    arguments = ("--budgets", "0.5", "--tasks", "agreement")
    mixed = run(model, "--policies", "full,query_mixture", *arguments)
    assert mixed.exit_code == 0, mixed.output
    assert "refused: query_mixture 50% on agreement" in mixed.stdout
    assert run(model, "--policies", "query_mixture", *arguments).exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policies", "full,nope"), "nope"),
        (("--policies", "segments(knorm"), "parentheses"),
        (("--policies", ""), "policies"),
        (("--budgets", "0.5,0"), "above 0"),
        (("--budgets", "10%,200%"), "give a share up to 100%"),
        (("--budgets", "2"), "2"),
        (("--budgets", "half"), "--budgets is 'half'"),
        (("--seeds", "0,x"), "--seeds is '0,x'"),
        (("--tasks", "nope"), "known are recall, multi_query"),
        (("--tasks", "perplexity"), "--text FILE"),
        (("--tasks", "perplexity", "--text", "no/such.txt"), "no/such.txt"),
        (("--kv-cache-dtype", "bf16,int3"), "kv_cache_dtype is 'int3'"),
        (("--dialect", "latin"), "dialect"),
        (("--stats", "no/such.safetensors"), "no/such.safetensors"),
        (("--out", "/dev/null/below"), "--out"),
        (("--mode", "some"), "mode"),
        (("--block-size", "0"), "block_size is 0"),
    ],
)
def test_a_mistake_is_one_sentence(model, arguments, message):
    result = run(model, "--policies", "full", "--tasks", "agreement", *arguments)
    assert result.exit_code == 2, result.output
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last
    assert "Traceback" not in result.output


def test_an_out_that_is_a_file_is_refused_before_the_model_is_loaded(tmp_path):
    (tmp_path / "file").write_text("")
    result = run(tmp_path / "no-model", "--tasks", "agreement", "--out", tmp_path / "file")
    assert result.exit_code == 2, result.output
    assert "is a file; name a directory" in " ".join(result.stderr.split())


@pytest.mark.parametrize("option", ["--json", "--csv"])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(model, tmp_path, monkeypatch, option):
    ran = []
    monkeypatch.setattr(BatchRunner, "run", lambda *given: ran.append(given) or [])
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "below"):
        result = run(model, "--policies", "full", "--tasks", "agreement", option, path)
        assert result.exit_code == 2, result.output
        assert f"error: {option} '{path}' cannot be written" in result.stderr
    assert not ran


def test_an_interrupted_run_goes_on(model, tmp_path, monkeypatch):
    real, batches = BatchRunner.run, []

    def interrupted(self, *arguments):
        if len(batches) == 4:
            raise KeyboardInterrupt
        batches.append(arguments)
        return real(self, *arguments)

    monkeypatch.setattr(BatchRunner, "run", interrupted)
    result = run(model, *GRID, "--out", tmp_path)
    assert result.exit_code == 130
    assert f"the same command goes on from {tmp_path}" in result.stderr
    assert "nothing was kept" in run(model, *GRID).stderr

    counted = []
    monkeypatch.setattr(BatchRunner, "run", lambda *given: counted.append(given) or real(*given))
    assert run(model, *GRID, "--out", tmp_path).exit_code == 0
    assert len(counted) == 10 - 4  # two batches of five settings
    fresh = run(model, *GRID, "--json", tmp_path / "fresh.json")
    assert fresh.exit_code == 0
    times = ("tokens_per_s", "elapsed_s")
    rows = [
        [{k: v for k, v in row.items() if k not in times} for row in json.loads(file.read_text())["rows"]]
        for file in (tmp_path / "report.json", tmp_path / "fresh.json")
    ]
    assert rows[0] == rows[1]


def test_statistics_can_be_named(model, tmp_path):
    from kvreclaim import LLM
    from kvreclaim.calibrate.calibration import calibrate

    llm = LLM(model, dtype="float32", device="cpu", num_blocks=8)
    stats = tmp_path / "stats.safetensors"
    calibrate(llm.loaded, tiny.prompts((150, 80), seed=5), num_centers=4).save(stats)
    arguments = ("--policies", "query_mixture", "--budgets", "0.5", "--tasks", "agreement", "--stats", stats)
    assert run(model, *arguments).exit_code == 0
