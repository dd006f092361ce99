"""The command line: every command runs on the demo model; a mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import platform
import re

import pytest
import torch
from typer.testing import CliRunner

from kvreclaim import __version__, demo_model
from kvreclaim.cli.main import app
from kvreclaim.compression.registry import policy_names
from kvreclaim.compression.stats import QueryStats
from kvreclaim.engine.request.verify import Verify
from kvreclaim.eval.chain import ChainTask
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.task_names import TASK_KINDS
from kvreclaim.eval.tasks import FORCED_TASKS, TEXT_TASKS
from kvreclaim.ops import extension, native

runner = CliRunner()
DEMO = ("--model", "demo")


@pytest.fixture(scope="module")
def example():
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo_model())
    sample = ChainTask(num_prompt_tokens=400, num_trace_tokens=120).sample(3)
    return tokenizer.decode(sample.prompt), tokenizer.decode(sample.trace, skip_special_tokens=True)


def run(*arguments):
    return runner.invoke(app, [str(argument) for argument in arguments])


def test_version():
    first, *facts = run("--version").stdout.splitlines()
    assert first.split() == ["kvreclaim", __version__]
    versions = dict(fact.strip().split(": ", 1) for fact in facts)
    assert versions["Python"].startswith(platform.python_version())
    assert versions["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{40}|unknown", versions["commit"])
    if native.unavailable_reason() is None:
        assert versions["used on this CPU"] == native.describe().split("(")[1].split(",")[0]
        assert set(native.supported_isas()) <= set(versions["instruction sets built"].split(", "))
        assert re.match(r"(gcc|clang) \d+\.", versions["native extension"])


def test_version_says_why_there_are_no_kernels(monkeypatch):
    monkeypatch.setattr(extension, "_module", None)
    monkeypatch.setattr(extension, "_reason", "no compiler")
    lines = run("--version").stdout.splitlines()
    assert lines[-1] == "native extension: not built: reference kernels (no compiler)"


def test_generate_streams_the_right_trace(example):
    prompt, trace = example
    result = run("generate", *DEMO, "--prompt", prompt, "--max-tokens", 150)
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n")[0].split() == trace.split()
    assert "finish_reason" in result.stderr
    assert "stop" in result.stderr


def test_generate_with_compression_reports_blocks_freed(example):
    arguments = ("--kv-compression", "query_mixture", "--kv-budget", 200, "--kv-compression-interval", 32)
    result = run("generate", *DEMO, "--prompt", example[0], "--max-tokens", 60, *arguments, "--kv-recent", 64)
    assert result.exit_code == 0, result.output
    rows = dict(line.strip("│ ").split("│") for line in result.stderr.splitlines() if line.count("│") == 3)
    metrics = {key.strip(): value.strip() for key, value in rows.items()}
    assert int(metrics["blocks_freed"]) > 0
    assert metrics["reclaim_efficiency"] == "1.00"


@pytest.mark.parametrize("command", ["generate", "run"])
def test_the_first_line_names_the_format_of_a_share(command, example):
    arguments = (*DEMO, "--prompt", example[0], "--max-tokens", 2, "--kv-compression", "knorm")
    shared = run(command, *arguments, "--kv-budget", "50%", "--kv-cache-dtype", "int8")
    assert shared.exit_code == 0, shared.output
    line = "compression: knorm, 50% of the prompt's bytes in the model's dtype; KV cache in int8"
    assert shared.stderr.splitlines()[0] == line
    tokens = run(command, *arguments)
    assert tokens.stderr.splitlines()[0] == "compression: knorm, 2,048 tokens per KV head"


def test_generate_as_json_has_rates_and_no_zeros(example):
    options = ("--prompt", example[0], "--max-tokens", 60)
    plain, result = run("generate", *DEMO, *options), run("generate", *DEMO, *options, "--json")
    found = json.loads(result.stdout)
    assert found["text"] + "\n" == plain.stdout
    assert (found["finish_reason"], found["num_generated_tokens"]) == ("length", 60)
    assert all(found.values())
    assert "blocks_freed" not in found
    assert found["tokens_per_s"] == pytest.approx(59 / (found["e2e_s"] - found["ttft_s"]))
    rows = [line.strip("│ ").split("│")[1].strip() for line in plain.stderr.splitlines() if "│" in line]
    assert not {"0", "0.000", "None", "False", "-"} & {*rows}


def test_policies_are_listed():
    head, *rows = (line.strip().split(maxsplit=3) for line in run("policies").stdout.splitlines())
    assert head == ["policy", "calibration", "heads", "keeps"]
    assert [row[0] for row in rows] == list(policy_names())
    traits = {row[0]: row[1:3] for row in rows}
    assert traits["knorm"] == ["no", "equal"]
    assert traits["query_mixture"] == ["yes", "equal"]
    assert traits["shares"] == ["yes", "unequal"]
    assert all(len(row) == 4 for row in rows)
    assert {row[0]: row[3] for row in rows}["keydiff"].endswith("the mean direction of all live keys")


def test_tasks_are_listed():
    rows = [re.split("  +", line.strip()) for line in run("tasks").stdout.splitlines()]
    listed = {row[0] for row in rows}
    assert {"needles, needles:known, needles:chunks", "recall", "ruler, ruler:TASK", "gsm8k"} < listed
    assert all(len(row) == 2 for row in rows)
    assert {*DEMO_TASKS, *TEXT_TASKS, *FORCED_TASKS} < set(TASK_KINDS)


def test_generate_verifies_what_a_compressed_cache_drafts(example, monkeypatch):
    num_accepted = []
    note = Verify.note

    def noting(self, probabilities, accepted):
        num_accepted.append(accepted)
        note(self, probabilities, accepted)

    monkeypatch.setattr(Verify, "note", noting)
    arguments = ("generate", *DEMO, "--prompt", example[0], "--max-tokens", 60)
    plain = run(*arguments)
    drafted = run(*arguments, "--kv-compression", "query_mixture", "--kv-budget", "auto", "--verify")
    assert drafted.exit_code == 0, drafted.output
    assert drafted.stdout == plain.stdout
    assert sum(num_accepted) > 30


def test_generate_goes_on_from_a_session(example, tmp_path):
    prompt = example[0]
    arguments = ("--max-tokens", 20, "--session", tmp_path / "a.session")
    first = run("generate", *DEMO, "--prompt", prompt, *arguments)
    assert "tokens are saved" in first.stderr
    assert "restored" not in first.stderr
    again = run("generate", *DEMO, "--prompt", prompt, *arguments)
    assert "tokens are restored" in again.stderr
    assert again.stdout == first.stdout
    (tmp_path / "a.session").write_bytes(b"something else")
    refused = run("generate", *DEMO, "--prompt", prompt, *arguments)
    assert refused.exit_code != 0
    assert "is no session, or is damaged" in refused.stderr


def test_generate_asks_again_about_what_was_compressed(example, tmp_path):
    prompt = example[0]
    compression = ("--kv-compression", "knorm", "--kv-budget", 48, "--kv-sinks", 2, "--kv-recent", 8)
    place = ("--compress-prompt-at", 64, "--max-tokens", 8)
    arguments = (*compression, *place, "--session", tmp_path / "a.session")
    first = run("generate", *DEMO, "--prompt", prompt, *arguments)
    assert "64 tokens are saved" in first.stderr
    again = run("generate", *DEMO, "--prompt", prompt, *arguments)
    assert "64 tokens are restored" in again.stderr
    assert again.stdout == first.stdout
    assert re.search(r"num_cached_tokens\D+64\b", again.stderr)
    refused = run("generate", *DEMO, "--prompt", prompt, *place)
    assert refused.exit_code != 0
    assert "compression evicts nothing" in refused.stderr


@pytest.mark.parametrize("form", ["int8", "bfloat16"])
def test_generate_from_another_format(example, form):
    prompt, trace = example
    result = run("generate", *DEMO, "--prompt", prompt, "--max-tokens", 150, "--kv-cache-dtype", form)
    assert result.exit_code == 0, result.output
    assert result.stdout.split("\n")[0].split() == trace.split()
    assert f"KV {'bf16' if form == 'bfloat16' else form}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kv-compression", "nope"), "nope"),
        (("--kv-compression", "knorm", "--kv-budget", 100), "raise the budget"),
        (("--kv-compression", "knorm", "--kv-budget", "auto"), "budget is 'auto', but verify is False"),
        (("--kv-compression", "full", "--verify"), "verify is True, but policy full evicts nothing"),
        (("--model", "no/such/dir"), "no/such/dir"),
        (("--dtype", "int3"), "int3"),
        (("--temperature", -1), "temperature"),
        (("--max-model-len", 2**20), "max_model_len"),
        (("--num-blocks", 1), "num_blocks"),
        (("--kv-cache-dtype", "int3"), "kv_cache_dtype is 'int3'"),
        (
            (
                *("--kv-cache-dtype", "fp8", "--kv-budget", 200),
                *("--kv-compression", "streaming_llm(positions=cache)"),
            ),
            "in fp8_e4m3 each turn would round them anew",
        ),
    ],
)
def test_a_mistake_is_one_sentence(arguments, message):
    result = run("generate", *DEMO, "--prompt", "GO " * 30, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


def test_calibrate_writes_statistics(tmp_path, example):
    text, output = tmp_path / "text.txt", tmp_path / "stats.safetensors"
    text.write_text("\n---\n".join(f"{example[0]} {example[1]}" for _ in range(2)))
    result = run("calibrate", *DEMO, "--text", text, "-o", output, "--centers", 4)
    assert result.exit_code == 0, result.output
    stats = QueryStats.load(output)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("concentration R by layer: ")]
    assert len(line.partition(": ")[2].split()) == stats.metadata.num_layers
    assert stats.metadata.num_centers == 4
    assert stats.metadata.num_tokens > 900
    prompt = ("generate", *DEMO, "--prompt", "GO L8 START c3 ash .", "--kv-compression", "triattention")
    assert run(*prompt, "--kv-budget", 200, "--kv-compression-stats", output).exit_code == 0


def test_calibrate_refuses_bad_input(tmp_path):
    output = tmp_path / "stats.safetensors"
    missing = run("calibrate", *DEMO, "--text", tmp_path / "none.txt", "-o", output)
    assert missing.exit_code == 2
    assert "none.txt" in missing.stderr
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "is empty" in run("calibrate", *DEMO, "--text", empty, "-o", output).stderr
    assert not output.exists()
