"""What the plugin does on this machine's own card: `kvreclaim bench vllm --gpu-check`.

vLLM runs without the plugin and then with it, once with equal and once with unequal heads, each in a process
of its own. Greedy answers of requests that are not compressed are compared with vLLM's own. Compressed
requests must give blocks back. What fails is part of the page.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from kvreclaim.bench.common import Columns, Row, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems.base import SkipPoint, random_prompts
from kvreclaim.bench.systems.worker_process import (
    VLLM_START_TIMEOUT_S,
    VllmProcess,
    compression_option,
    kv_bytes_per_token,
    link_model,
)

PAGE = Path("kvreclaim-gpu-check.json")
PLAIN = "vLLM"
REQUESTS, PROMPT, OUTPUT = 8, 640, 256
"""Requests at once, tokens of their prompts and answers."""
ROUNDS = 3
ON_A_CPU: Row = {"enforce_eager": True, "block_size": 32, "num_gpu_blocks_override": 321}
"""Options for vLLM's CPU build; a GPU takes vLLM's own."""
OFF: Row = {"kv_compression": "off"}


def run(plan: VllmPlan, console: Console) -> tuple[list[Row], Row]:
    """Run vLLM without the plugin, then with it under two policies.

    Returns: a row of each, and the versions that the first has reported.
    """
    policies = list(dict.fromkeys([plan.policy, _unequal(plan.policy)]))
    rows: list[Row] = []
    versions: Row = {}
    with tempfile.TemporaryDirectory(prefix="checked-") as folder:
        model = Path(folder, "model")
        link_model(plan.model, model)
        for policy in (None, *policies):
            row, more = _side(plan, model, policy, rows[0] if rows else None)
            rows.append(row)
            versions = versions or more
            console.print(f"{row['system']}: {row['verdict']}", style="dim")
    return [{name: value for name, value in row.items() if name != "tokens"} for row in rows], versions


def passed(rows: Sequence[Row]) -> bool:
    """Return whether every side did what it is to do."""
    return all(row["verdict"] == "ok" for row in rows)


def _unequal(policy: str) -> str:
    return policy if policy.startswith(("shares", "ada_kv", "pyramidkv")) else f"shares({policy})"


def _side(plan: VllmPlan, model: Path, policy: str | None, plain: Row | None) -> tuple[Row, Row]:
    """Run one side. policy: None without the plugin; plain: the row of that side."""
    row: Row = {"system": PLAIN if policy is None else f"{PLAIN} + kvreclaim, {policy}", "policy": policy}
    row |= plan.facts() | {"budget": plan.budget, "interval": plan.interval}
    pool_bytes = ON_A_CPU["num_gpu_blocks_override"] * 32 * kv_bytes_per_token(plan.model, 4)
    process = VllmProcess(plan.python, plan.threads, pool_bytes, plugin=policy is not None)
    versions: Row = {}
    try:
        with closing(process):
            row |= _started(plan, process, model, policy)
            versions = process.versions()
            row |= _plain_requests(process, plain)
            if policy is not None:
                row |= _compressed_requests(process, row)
            row["verdict"] = "; ".join(_problems(row, plain)) or "ok"
    except SkipPoint as error:
        row |= {"verdict": f"failed: {error}", "log": process.log.read_text("utf-8", "replace")[-20_000:]}
    return row, versions


def _started(plan: VllmPlan, process: VllmProcess, model: Path, policy: str | None) -> Row:
    """Start vLLM. Returns: the card, and what vLLM says of itself."""
    found = process.ask("platform")
    options: Row = {"model": str(model), "dtype": plan.dtype, "max_model_len": PROMPT + OUTPUT + 32}
    options |= {"max_num_seqs": REQUESTS, "max_num_batched_tokens": 2048, "enable_prefix_caching": False}
    options |= ON_A_CPU if found["device"] == "cpu" else {}
    if policy is not None:
        settings: Row = {"policy": policy, "budget": plan.budget, "interval": plan.interval}
        compression = compression_option(plan.model, plan.stats, **settings)
        options["additional_config"] = {"kv_compression": compression}
    process.facts = process.ask("load", timeout_s=VLLM_START_TIMEOUT_S, **options)
    return found | process.facts


def _plain_requests(process: VllmProcess, plain: Row | None) -> Row:
    """Answer requests without compression, several times. equal: answers of the first time that the last time
    repeats, or on the side with the plugin those of the side without it."""
    extra = None if plain is None else OFF
    runs = [_answers(process, extra) for _ in range(ROUNDS)]
    first, expected = runs[0]["tokens"], runs[-1]["tokens"]
    if plain is not None and "tokens" in plain:
        expected = plain["tokens"]
    return {
        "tokens": first,
        "equal": sum(one == other for one, other in zip(first, expected, strict=True)),
        "plain_tokens_per_s": _speed(runs[1:]),
    }


def _compressed_requests(process: VllmProcess, row: Row) -> Row:
    runs = [_answers(process, None) for _ in range(ROUNDS)]
    reports: list[Row] = [report for run in runs for report in run["reports"] if report]
    totals = {name: sum(one[name] for one in reports) for name in ("blocks_freed", "compactions")}
    return totals | {
        "tokens_per_s": _speed(runs[1:]),
        "kept": max((one["kv_tokens"] for one in reports), default=None),
        "repeated": sum(a == b for a, b in zip(runs[0]["tokens"], runs[-1]["tokens"], strict=True)),
        "like_plain": sum(a == b for a, b in zip(runs[0]["tokens"], row["tokens"], strict=True)),
    }


def _answers(process: VllmProcess, extra: Row | None) -> Row:
    prompts = random_prompts(REQUESTS, PROMPT, process.facts["vocab_size"], seed=1)
    return process.ask("generate", prompts=prompts, max_tokens=OUTPUT, extra=extra)


def _speed(runs: Sequence[Row]) -> float:
    return REQUESTS * OUTPUT / median(run["elapsed_s"] for run in runs)


def _problems(row: Row, plain: Row | None) -> Iterator[str]:
    if plain is None:
        return
    if not row["plugin"]:
        yield "the plugin is not installed in vLLM's environment"
    if row["equal"] < plain.get("equal", 0):
        yield (
            f"{row['equal']} of {REQUESTS} uncompressed answers are vLLM's own, which gives {plain['equal']} "
            "twice"
        )
    most = row["budget"] + row["interval"] + row["block_size"]
    if not row["blocks_freed"]:
        yield "no block was given back"
    elif row["kept"] > most:
        yield f"a request held {row['kept']} tokens, more than budget, interval and a block ({most})"


COLUMNS: Columns = {
    "system": "{system}",
    "uncompressed answers like vLLM's": lambda row: (
        f"{row['equal']} of {REQUESTS}" if "equal" in row else "-"
    ),
    "output tokens/s": lambda row: f"{row['plain_tokens_per_s']:.0f}" if "equal" in row else "-",
    "compressed: output tokens/s": "{tokens_per_s:.0f}",
    "passes": "{compactions}",
    "blocks given back": "{blocks_freed:,}",
    "verdict": "{verdict}",
}


def check_page(rows: Sequence[Row]) -> str:
    """Format the page: the card, vLLM's own words, and a table in Markdown."""
    known: dict[str, Any] = next((row for row in rows if "vllm" in row), {})
    names = ("card", "vllm", "vllm_torch", "runner", "attention", "graphs", "block_size", "num_blocks")
    facts = "\n".join(f"- {name}: {known[name]}" for name in names if name in known)
    return f"{facts}\n\n{markdown(COLUMNS, cells(COLUMNS, rows))}"
