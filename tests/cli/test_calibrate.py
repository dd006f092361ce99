"""Options of `kvreclaim calibrate` reach the file that it writes."""

import pytest
import tiny
from typer.testing import CliRunner

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.cli.main import app
from kvreclaim.compression.loss_curve import LossCurve
from kvreclaim.compression.prefill.per_head import Patterns
from kvreclaim.compression.stats import QueryStats
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.vocabulary import TOKENS
from kvreclaim.model.loader import load_model
from kvreclaim.model_paths import REAL_MODEL, shipped_statistics


@pytest.fixture
def text(tmp_path):
    example = ChainTask(300, 200).sample(0)
    file = tmp_path / "text.txt"
    file.write_text(" ".join(TOKENS[token] for token in example.document))
    return file


def calibrated(text, *options):
    output = text.with_name("stats.safetensors")
    result = CliRunner().invoke(
        app, ["calibrate", "--model", "demo", "--text", str(text), "-o", str(output), *options]
    )
    assert result.exit_code == 0, result.output
    return QueryStats.load(output), result.output


def test_covariance_is_kept_unless_refused(text):
    stats, output = calibrated(text, "--centers", "2")
    meta = stats.metadata
    assert stats.q_cov.shape == (meta.num_layers, meta.num_heads, meta.head_dim, meta.head_dim)
    assert "with covariance" in output
    stats, output = calibrated(text, "--centers", "2", "--no-covariance")
    assert stats.q_cov is None
    assert "with covariance" not in output


def test_centres_of_kv_heads(text):
    stats, output = calibrated(text, "--centers", "3", "--shared-centers")
    assert stats.metadata.shared_centers
    assert stats.centers.shape[1] == stats.metadata.num_kv_heads
    assert "3 centres per KV head" in output


def test_a_trial_on_held_out_windows_is_printed_and_kept(tmp_path, tiny_dir):
    """Without --text, on texts that every machine has; `--show` prints the result again."""
    output = tmp_path / "stats.safetensors"
    options = ["--max-tokens", "2400", "--trial", "1", "--centers", "2", "--candidates", "random, knorm"]
    result = CliRunner().invoke(
        app, ["calibrate", "--model", str(tiny_dir("llama")), "-o", str(output), *options]
    )
    assert result.exit_code == 0, result.output
    trial = QueryStats.load(output).metadata.trial
    assert trial.policies[-2:] == ("random", "knorm")
    assert trial.documents == 2
    again = CliRunner().invoke(app, ["calibrate", "--show", str(output)])
    assert again.exit_code == 0, again.output
    assert f"policy auto: {trial.best}" in again.stdout
    assert again.stdout.splitlines() == [
        line for line in result.stdout.splitlines() if line in again.stdout.splitlines()
    ]


def test_questions_of_a_trial_are_shown():
    file = shipped_statistics(REAL_MODEL)
    trial = QueryStats.load(file).metadata.trial
    result = CliRunner().invoke(app, ["calibrate", "--show", str(file)])
    assert result.exit_code == 0, result.output
    assert f"{trial.questions} questions" in result.stdout
    for row in trial.outcomes:
        assert f"{row.asked - trial.full.asked:+.3f}" in result.stdout
        assert f"{row.asked_right / trial.full.asked_right:.1%}" in result.stdout


def test_without_output_the_cache_directory_keeps_them_for_auto(tmp_path, tiny_dir, monkeypatch):
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path))
    model = ["--model", str(tiny_dir("llama"))]
    options = ["--max-tokens", "2400", "--centers", "2"]
    result = CliRunner().invoke(app, ["calibrate", *model, *options])
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "stats").iterdir()
    best = QueryStats.load(file).metadata.trial.best
    request = ["--prompt", "a", "--max-tokens", "2", "--kv-compression", "auto", "--num-blocks", "200"]
    for more in ([], ["--kv-compression-calibrate"]):
        result = CliRunner().invoke(app, ["generate", *model, *request, *more])
        assert result.exit_code == 0, result.output
        assert best in result.stderr
        assert "calibrated now" not in result.stderr


def test_generate_calibrates_first_with_the_option(tmp_path, tiny_dir, monkeypatch):
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path))
    command = ["generate", "--model", str(tiny_dir("llama")), "--prompt", "a", "--max-tokens", "2"]
    result = CliRunner().invoke(app, [*command, "--num-blocks", "200", "--kv-compression-calibrate"])
    assert result.exit_code == 0, result.output
    (file,) = (tmp_path / "stats").iterdir()
    assert f"{file} will keep them" in result.stderr
    assert "documents to try" in result.stderr
    assert QueryStats.load(file).metadata.trial.best in result.stderr


def test_without_output_where_others_are_read_first_is_one_sentence():
    result = CliRunner().invoke(app, ["calibrate", "--model", "demo"])
    assert result.exit_code == 2
    assert "add --output FILE.safetensors" in result.output


def test_a_text_that_the_model_does_not_know_is_refused(tmp_path):
    output = str(tmp_path / "stats.safetensors")
    result = CliRunner().invoke(app, ["calibrate", "--model", "demo", "-o", output])
    assert result.exit_code == 2
    assert "of the words of the text; pass a text of its own language with --text" in result.output


def test_patterns_of_heads_go_to_a_file_of_their_own(text):
    target = text.with_name("heads.json")
    options = ["calibrate", "--model", "demo", "--text", str(text), "--sparse-prefill", str(target)]
    result = CliRunner().invoke(app, [*options, "--budget", "128"])
    assert result.exit_code == 2
    assert "no document is long enough" in result.output
    example = ChainTask(2200, 200).sample(0)
    text.write_text(" ".join(TOKENS[token] for token in example.document))
    result = CliRunner().invoke(app, [*options, "--budget", "128"])
    assert result.exit_code == 0, result.output
    patterns = Patterns.load(target)
    assert "KV heads:" in result.output
    assert sum(map(len, patterns.heads)) == int(result.output.split()[0])
    assert {head for layer in patterns.heads for head in layer} <= {0, 1, 2}
    both = CliRunner().invoke(app, [*options, "-o", "x.safetensors"])
    assert both.exit_code == 2
    assert "name one" in both.output


def test_a_loss_curve_is_added_printed_and_kept(tmp_path, tiny_dir):
    """To a trial's statistics, on text that it has not read; serving finds it."""
    model, first, output = str(tiny_dir("llama")), tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    reading = ["--max-tokens", "2400", "--centers", "2"]
    result = CliRunner().invoke(app, ["calibrate", "--model", model, "-o", str(first), *reading])
    assert result.exit_code == 0, result.output
    arguments = ["--stats", str(first), "--curve", "192", "--curve-documents", "19", "--max-tokens", "2400"]
    arguments += ["--curve-formats", "int4"]
    result = CliRunner().invoke(app, ["calibrate", "--model", model, "-o", str(output), *arguments])
    assert result.exit_code == 0, result.output
    assert "38 documents for the loss curve in auto, int4: about" in result.stdout
    before, after = (QueryStats.load(file).metadata for file in (first, output))
    assert after.model_copy(update={"curve": None}) == before
    assert after.curve.policy == after.trial.best
    assert [(cell.kv_cache_dtype, cell.content, cell.num_tokens) for cell in after.curve.cells] == [
        (form, content, 192) for form in ("auto", "int4") for content in ("prose", "lookups")
    ]
    again = CliRunner().invoke(app, ["calibrate", "--show", str(output)])
    assert again.exit_code == 0, again.output


def test_a_loss_curve_is_shown_over_bytes(tmp_path, tiny_dir):
    """In int4 four tokens take the bytes of one."""
    prose = [
        {
            "content": "prose",
            "num_tokens": 1024,
            "right": 0.5,
            "budgets": [256, 512],
            "losses": [[0.04, 0.01]] * 19,
        },
        {
            "content": "prose",
            "num_tokens": 1024,
            "right": 0.5,
            "kv_cache_dtype": "int4",
            "density": 4.0,
            "budgets": [256, 512, 1024],
            "losses": [[0.08, 0.03, 0.02]] * 19,
        },
    ]
    stats = calibrate(load_model(tiny_dir("llama")), tiny.prompts((90,)), num_centers=2)
    curve = LossCurve.model_validate({"policy": "knorm", "cells": prose})
    stats.with_curve(curve).save(tmp_path / "stats.safetensors")
    result = CliRunner().invoke(app, ["calibrate", "--show", str(tmp_path / "stats.safetensors")])
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["prose"]]
    assert rows == [
        ["prose", "1024", "auto", "4.0%", "4.0%", "1.0%", "1.0%"],  # from 30 % on
        ["prose", "1024", "int4", "8.0%", "3.0%", *["2.0%"] * 4],  # from 10 % on
        ["prose", "1024", "auto", "50.0%", "50.0%", "(512)", "50.0%", "(512)", "25.0%", "(256)"],
        ["prose", "1024", "int4", "50.0%", "-", "25.0%", "(1024)", "12.5%", "(512)"],
    ]
    assert "--kv-max-loss 0.01: KV cache dtype auto, 50.0% of the bytes" in result.stdout
    assert "--kv-max-loss 0.02: KV cache dtype int4, 25.0% of the bytes" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--curve", "192", "--trial", "0"], "there is no trial; pass a longer text, or --trial above 0"),
        (["--curve", "100"], "curve has documents of 100 tokens, which must leave room for a budget"),
        (["--curve", "500"], "below the model's limit of 512; change the length"),
        (["--curve", "352", "--curve-documents", "9999"], "curve needs 9999 documents of 480 tokens that"),
        (["--curve-documents", "18"], "curve_documents is 18; it must be an integer >= 19"),
        (["--stats", "a.safetensors"], "none is measured; pass --curve"),
        (["--curve", "192", "--curve-formats", "int7"], "kv_cache_dtype is 'int7'; it must be one of auto, "),
    ],
)
def test_a_curve_is_refused_before_anything_is_measured(tmp_path, tiny_dir, options, message):
    output = ["-o", str(tmp_path / "stats.safetensors")]
    result = CliRunner().invoke(app, ["calibrate", "--model", str(tiny_dir("llama")), *output, *options])
    assert result.exit_code == 2, result.output
    assert message in result.stderr
    assert "to fit to" not in result.stdout
