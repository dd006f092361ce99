"""No input of a command ends in a traceback: odd files, values and places are one sentence, or an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvreclaim.cli.main import app

runner = CliRunner()
LONG, HUGE = "a" * 300, "9" * 400
FILES = {
    "empty": b"",
    "bytes": bytes(range(256)) * 4,
    "list": b"[1]",
    "deep": b"[" * 100_000,
    "object": b'{"a": 1}',
    "header.gguf": b"GGUF",
    "short.safetensors": b"xx",
}
ODD_FILES = (*FILES, "folder", "no-such", "empty/below", LONG, "")
PLAN = ("plan", "--model", "Llama-3.2-1B")
SIM = ("simulate", "--model", "Llama-3.2-1B", "--gpu", "4090")
DRAWN = (*SIM, "--requests", "3", "--rate", "5", "--prompt", "20", "--output", "4")


@pytest.fixture(autouse=True)
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    for name, content in FILES.items():
        Path(name).write_bytes(content)


def run(*arguments: str) -> Any:
    """The command's result: an answer, or refused with 2 and a message."""
    result = runner.invoke(app, arguments)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
    assert result.exit_code in (0, 2), result.output
    assert result.exit_code == 0 or result.stderr.strip()
    return result


def refused(*arguments: str) -> None:
    assert run(*arguments).exit_code == 2


@pytest.mark.parametrize("name", ODD_FILES)
def test_a_file_that_is_none_of_its_kind(name: str) -> None:
    refused("plan", "--model", name)
    refused(*SIM, "--trace", name)
    refused(*PLAN, "--gpu", "4090", "--calibration", name or ".")
    refused(*DRAWN, "--calibration", name or ".")
    refused(*PLAN, "--trace", name or ".", "--cards", "all", "--slo", "ttft=1s")
    known = ("--shape", "Llama-3.2-1B", "--gpu", "4090", "--num-gpu-blocks", "5")
    refused("calibrate-speed", "-o", "speed.json", "--log", name or ".", *known)


@pytest.mark.parametrize("name", ["folder", "empty/below", LONG, ""])
def test_a_file_that_cannot_be_written_is_refused_before_anything_runs(name: str) -> None:
    for command in (PLAN, DRAWN, ("demo",), ("bench", "decode")):
        refused(*command, "--json", name)
    for command in (("calibrate-speed", "-o"), ("calibrate", "--sparse-prefill")):
        refused(*command, name)
    refused("eval", "--csv", name)


def test_what_fails_while_it_is_written_is_a_sentence() -> None:
    refused(*PLAN, "--json", "/dev/full")
    refused(*PLAN, "--json", "/proc/no-such/file")


def test_charts_are_images() -> None:
    refused(*DRAWN, "--chart", "chart.xyz")


CONFIGS: tuple[dict[str, Any], ...] = (
    {"model_type": []},
    {"model_type": "llama", "hidden_size": int(HUGE)},
    {"model_type": "llama", "num_attention_heads": 10**30},
    {"model_type": "llama", "kvreclaim": {"names": []}, "num_hidden_layers": 1.5},
    {"model_type": "llama", "layer_types": 5},
    {"model_type": "llama", "quantization_config": {"quant_method": "awq", "bits": 10**9, "group_size": 1}},
    {"model_type": "gemma2", "layer_types": 5},
    {"model_type": "gemma2", "layer_types": [["a"]] * 26},
    {"model_type": "gemma2", "sliding_window": "x"},
    {"model_type": "mixtral", "num_local_experts": "8"},
    {"model_type": "llama4_text", "moe_layers": 5},
    {"model_type": "llama4_text", "no_rope_layers": 5},
    {"model_type": "llama4_text", "no_rope_layers": [1]},
    {"model_type": "qwen3_moe", "mlp_only_layers": 5},
    {"model_type": "deepseek_v3", "first_k_dense_replace": "x"},
    {"model_type": "deepseek_v3", "n_shared_experts": "x"},
    {"model_type": "gemma3", "text_config": []},
    {"model_type": "gemma3", "text_config": {"model_type": 5}},
)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configs_of_no_model(config: dict[str, Any]) -> None:
    Path("config.json").write_text(json.dumps(config))
    refused("plan", "--model", "config.json")


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            (flag, value)
            for flag in ("--context", "--block-size", "--memory-bytes")
            for value in ("0", "-5", "x")
        ),
        ("--context", HUGE),
        ("--memory-bytes", HUGE),
        ("--context", "9" * 5000),
        *(
            ("--weights", value)
            for value in ("", "nan", "inf", "group:4", "group:4:0", "group:0:0", "unknown:x")
        ),
        *(("--gpu", "4090", flag, "nan") for flag in ("--other-gib", "--utilization", "--price")),
        *(("--compression", value) for value in ("", ":", "snapkv((", "snapkv:budget=x", "a:b:c=d")),
        ("--kv-cache-dtype", ""),
        ("--gpu", ""),
        ("--no-such",),
    ],
    ids=lambda arguments: " ".join(arguments)[:40],
)
def test_numbers_and_names_that_are_none(arguments: tuple[str, ...]) -> None:
    refused(*PLAN, *arguments)


@pytest.mark.parametrize(
    "line",
    [
        '{"prompt_tokens": 1e400, "output_tokens": 1}',
        f'{{"prompt_tokens": {HUGE}, "output_tokens": 1}}',
        '{"prompt_tokens": 5, "output_tokens": 1, "arrival_s": Infinity}',
        '{"prompt_tokens": 5, "output_tokens": 1, "ids": 5}',
        '{"prompt_tokens": 5, "output_tokens": 1, "ids": [[1]]}',
        '{"prompt_tokens": 5, "output_tokens": 1, "session": [1]}',
        '{"prompt_tokens": 5, "output_tokens": 1, "priority": "x"}',
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": 5}',
        '{"prompt_tokens": 5, "output_tokens": 1}\n[1]',
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.979," + HUGE + ",1",
    ],
)
def test_traces_of_no_requests(line: str) -> None:
    Path("trace").write_text(line)
    refused(*SIM, "--trace", "trace")


def test_a_trace_of_one_request() -> None:
    Path("trace").write_text('{"prompt_tokens": 5, "output_tokens": 3, "arrival_s": 0}\n')
    assert run(*SIM, "--trace", "trace").exit_code == 0
    run(*PLAN, "--trace", "trace", "--cards", "all", "--slo", "ttft=1s")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--prompt", "9000000"), "the prompt leaves no token below max_model_len: 3"),
        (("--max-model-len", "20"), "the prompt leaves no token below max_model_len: 3"),
    ],
)
def test_requests_that_are_all_refused(arguments: tuple[str, ...], reason: str) -> None:
    """A figure that is not defined is a dash; the number of refusals and their reason are printed."""
    result = run(*DRAWN, *arguments, "--slo", "ttft=1s", "--json", "out.json")
    assert result.exit_code == 0
    assert f"3 ({reason})" in result.stdout
    assert "– / –" in result.stdout
    report = json.loads(Path("out.json").read_text())
    assert (report["refused"], report["requests"], report["ttft_s"]) == (3, 0, {})
    for axis in ("replicas", "rate", "max_num_seqs"):
        assert "none" in run(*DRAWN, *arguments, "--slo", "ttft=1s", "--search", axis).stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("--replicas", "0"),
        ("--replicas", "9" * 30),
        ("--router", "x"),
        ("--search", "x"),
        ("--search", "rate"),
        ("--slo", "x"),
        ("--scrape", "nan"),
        ("--num-blocks", "9" * 30),
        ("--block-size", "9" * 30),
        ("--eviction-policy", "x"),
        ("--memory-bytes", "1"),
        ("--compression", "paged_eviction:budget=512"),
    ],
    ids=" ".join,
)
def test_simulations_of_nothing(arguments: tuple[str, ...]) -> None:
    refused(*DRAWN, *arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        ("eval", "--model", "demo", "--budgets", "nonsense"),
        ("eval", "--model", "demo", "--seeds", "1.5"),
        ("eval", "--model", "demo", "--out", "empty"),
        ("calibrate",),
        ("calibrate", "-o", "folder"),
        ("calibrate", "--show", "short.safetensors"),
        ("calibrate", "--show", "folder"),
        ("fetch", "header.gguf", "-o", "out"),
        ("fetch", "no-such.gguf", "-o", "out"),
        ("fetch", LONG + ".gguf", "-o", "out"),
        ("eval", "--model", "demo", "--tasks", "jsonl:" + LONG),
        ("fetch", "header.gguf", "-o", "empty"),
        ("serve", "--model", "demo", "--port", "-1"),
        ("serve", "--model", "demo", "--log-level", "x"),
        ("serve", "--model", "demo", "--chat-template", "folder"),
        ("serve", "--model", "demo", "--chat-template", "bytes"),
        ("generate", "--prompt", "x", "--model", "folder"),
        ("generate", "--prompt", "x", "--model", "header.gguf"),
        ("generate", "--prompt", "x", "--model", "demo", "--session", LONG),
        ("generate", "--prompt", "x", "--model", "demo", "--hf-overrides", "[" * 100_000),
        ("generate", "--prompt", "x", "--model", "demo", "--speculative-config", "[" * 100_000),
        ("bench", "decode", "--contexts", "x"),
        ("bench", "decode", "--threads", "9" * 30),
        ("bench", "kernels", "--ops", "no-such"),
        ("demo", "--out", "empty"),
    ],
    ids=lambda arguments: " ".join(arguments)[:60],
)
def test_other_commands(arguments: tuple[str, ...]) -> None:
    refused(*arguments)
