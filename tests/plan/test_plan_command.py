"""Every option of `kvreclaim plan` is used or refused, in one sentence; none is accepted and ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvreclaim.cli.main import app
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.recompute import longest_recompute

runner = CliRunner()
MODEL = ("--model", "Llama-3.1-8B")
TRACE = Path(__file__).parents[1] / "sim" / "data" / "vllm-run-4090" / "requests.jsonl"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "no-such"], "is no directory with a config.json"),
        (["--gpu", "voodoo"], "--gpu 'voodoo' is not known"),
        (["--context", "5", "--compression", "unheard:budget=500"], "'unheard' is not built in"),
        (["--context", "5", "--compression", "knorm(kep=large)"], "no option 'kep'"),
        (["--context", "5", "--kv-cache-dtype", "int3"], "kv_cache_dtype is 'int3'"),
        (["--weights", "int3"], "--weights is 'int3'"),
        (["--sequences", "5"], "a load has a number of sequences, and tokens in each"),
        (["--own", "5"], "a load has a number of sequences"),
        (["--trace", str(TRACE)], "no option uses it"),
        (["--first", "5"], "first limits a trace"),
        (["--cards", "all", "--slo", "ttft=2s"], "goes by the lengths of a trace"),
        (["--cards", "all", "--trace", str(TRACE)], "pass --cards and --slo together"),
        (["--recompute-p99-ms", "5", "--trace", str(TRACE)], "recompute_p99_ms is about one card"),
        (["--recompute-p99-ms", "5", "--trace", str(TRACE), "--memory-bytes", "99999999999"], "with --gpu"),
        (["--price", "5"], "price is about one card"),
        (["--tensor-parallel-size", "2"], "tensor_parallel_size is about one card"),
        (["--other-gib", "2"], "other_gib is about a card"),
        (["--max-model-len", "5"], "max_model_len is what sequences reserve"),
        (["--gpu", "4090", "--calibration", "no-such"], "is no file"),
        (["--utilization", "2"], "utilization is 2.0"),
        (
            ["--model", "Llama-3.1-70B", "--gpu", "4090"],
            "does not fit on 1 card of 4090: 0.92 of 23.516 GiB have no room for weights of 131.417 GiB, "
            "other 1.356 GiB and a block of 5 MiB per card; pass --tensor-parallel-size 8 for 8 such cards "
            "with weights of 16.427 GiB each",
        ),
        (
            ["--model", "Llama-3.1-70B", "--gpu", "4090", "--weights", "awq4"],
            "pass --tensor-parallel-size 2 for 2",
        ),
        (
            ["--model", "Llama-3.1-70B", "--gpu", "4090", "--context", "120000"],
            "pass --tensor-parallel-size 16 for 16 such cards with weights of 8.214 GiB each",
        ),
        (["--model", "DeepSeek-V3", "--memory-bytes", "4000000000"], "not even 64 such cards have room"),
        (
            ["--model", "Qwen3-30B-A3B", "--gpu", "4090", "--tensor-parallel-size", "3"],
            "does not divide the 32 heads and 4 KV heads of Qwen/Qwen3-30B-A3B; pass one of 1, 2, 4, 8, 16",
        ),
        (["--model", "Phi-3-mini-4k-instruct", "--compression", "ada_kv"], "mini-4k-instruct is one"),
        (
            ["--compression", "streaming_llm(positions=cache)", "--kv-cache-dtype", "int8"],
            "turns keys to new positions at every pass",
        ),
    ],
)
def test_mistakes_are_one_sentence(arguments: list[str], message: str) -> None:
    model = [] if "--model" in arguments else MODEL
    result = runner.invoke(app, ["plan", *model, *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert message in result.stderr


def figures(tmp_path: Path, *arguments: object) -> dict:
    file = tmp_path / "out.json"
    result = runner.invoke(app, ["plan", *MODEL, *map(str, arguments), "--json", str(file)])
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    ("flag", "value", "name"),
    [
        ("--memory-bytes", 60 << 30, "pool_blocks"),
        ("--utilization", 0.5, "pool_blocks"),
        ("--utilisation", 0.5, "pool_blocks"),
        ("--other-gib", 9, "pool_blocks"),
        ("--tensor-parallel-size", 2, "pool_blocks"),
        ("--weights", "fp8", "pool_blocks"),
        ("--kv-cache-dtype", "int8", "max_tokens"),
        ("--block-size", 32, "blocks"),
        ("--compression", "snapkv:budget=512", "max_sequences"),
        ("--max-num-batched-tokens", 8192, "other_bytes"),
        ("--max-model-len", 5000, "contiguous_tokens"),
        ("--price", 9, "price_per_hour"),
    ],
)
def test_every_option_changes_something(tmp_path: Path, flag: str, value: object, name: str) -> None:
    args = ("--gpu", "H100", "--context", 3000)
    plain, other = figures(tmp_path, *args), figures(tmp_path, *args, flag, value)
    assert plain[name] != other[name]


@pytest.mark.parametrize(
    ("context", "flags", "bound"),
    [
        (131_072, (), "bandwidth"),
        (200, ("--weights", "fp8"), "compute"),
        (8192, ("--memory-bytes", 24 << 30), "memory"),
    ],
)
def test_what_binds(tmp_path: Path, context: int, flags: tuple, bound: str) -> None:
    assert figures(tmp_path, "--gpu", "H100", "--context", context, *flags)["binds"] == bound


def test_a_calibration_takes_the_place_of_the_data_sheet(tmp_path: Path) -> None:
    time = Linear(16.79e-3, 58.9e-6, 174.8e-9, 1.617e-9, -23.3e-6, 33e-6, 128)
    time.save(tmp_path / "speed.json")
    args = ("--gpu", "4090", "--trace", TRACE, "--recompute-p99-ms", 500)
    found = figures(tmp_path, *args, "--calibration", tmp_path / "speed.json")
    assert found["recompute_max_tokens"] == longest_recompute(time, 0.5, 2048)
    assert found["recompute_max_tokens"] != figures(tmp_path, *args)["recompute_max_tokens"]


def test_a_budget_changes_only_what_it_may(tmp_path: Path) -> None:
    """Recompute goes by whole lengths, whatever is held."""
    args = ("--gpu", "4090", "--trace", TRACE, "--recompute-p99-ms", 500)
    whole, cut = figures(tmp_path, *args), figures(tmp_path, *args, "--compression", "snapkv:budget=512")
    assert cut["recompute_max_tokens"] == whole["recompute_max_tokens"]
    assert cut["max_num_seqs"] > whole["max_num_seqs"]
