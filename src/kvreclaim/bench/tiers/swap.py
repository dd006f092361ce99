"""From a preemption to the next token of its sequence: blocks moved to the host and back, or computed again.

The sequence has its place back in the same step, so nothing is waited for. Prefix caching is off: no block is
found, as if others had taken all of them meanwhile, and a swap moves every block both ways.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

from rich.table import Table

from kvreclaim.bench.common import Columns, Row, alternate, sheet
from kvreclaim.bench.systems.base import random_prompts
from kvreclaim.bench.tiers.engines import facts, greedy, host_gib, load, require_equal
from kvreclaim.bench.tiers.plan import TiersPlan
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.request import Request

MODES = ("swap", "recompute")
STEPS = 4
"""Decoded after the prompt, before the preemption."""


class Running:
    """A sequence that decodes, in an engine of its own."""

    def __init__(
        self, llm: LLM, prompt: list[int], config: CompressionConfig | None, max_tokens: int
    ) -> None:
        self.engine, self.scheduler = llm.engine, llm.engine.scheduler
        compressor = None if config is None else llm.compressor(config)
        self.request: Request = self.engine.add_request("bench", prompt, greedy(max_tokens), compressor)

    @property
    def tokens(self) -> list[int]:
        return list(self.request.sequences[0].token_ids)

    def until(self, num_generated: int) -> None:
        """Step until so many tokens are there. Raises: RuntimeError."""
        while self.request.sequences[0].num_generated < num_generated:
            self.engine.step()
            if self.request.error is not None:
                raise RuntimeError(f"a request failed: {self.request.error}")

    def preempt(self) -> float:
        """Take its blocks. Returns: seconds until it has its next token."""
        decide: Callable[[Any], None] = self.scheduler._decide
        wanted = [True]

        def preempting(step: Any) -> None:
            if wanted.pop() if wanted else False:
                (victim,) = self.scheduler.running
                self.scheduler.preemptor.preempt([victim], victim, "itself", step)
            decide(step)

        known = self.request.sequences[0].num_generated
        with patch.object(self.scheduler, "_decide", preempting):
            started = perf_counter()
            self.until(known + 1)
            return perf_counter() - started

    def end(self) -> None:
        if not self.request.finished:
            self.engine.abort(self.request.request_id)


def run(plan: TiersPlan) -> list[Row]:
    """Compares answers, in fp32, then measures. Returns: a row for each policy and mode: ms (median), step_ms
    (of a step with no preemption), blocks, bytes_moved, ratio of recompute to this.

    Raises: WrongAnswerError."""
    rows = []
    for policy in plan.policies:
        _compare(plan, policy)
        rows += _measure(plan, policy)
    return rows


def _engines(plan: TiersPlan, dtype: str) -> dict[str, LLM]:
    plain = load(plan, dtype, enable_prefix_caching=False)
    gib = host_gib(plain, plan)
    made = {mode: plain.sibling(kv_offloading_size=gib, preemption_mode=mode) for mode in MODES}
    return {"undisturbed": plain, **made}


def _prompt(plan: TiersPlan, llm: LLM, seed: int) -> list[int]:
    return random_prompts(1, plan.prompt - STEPS, llm.loaded.vocab_size, seed)[0]


def _compare(plan: TiersPlan, policy: str) -> None:
    engines = _engines(plan, "float32")
    expected: list[int] = []
    for name, llm in engines.items():
        prompt = _prompt(plan, llm, 1)
        running = Running(llm, prompt, plan.policy(policy), STEPS + plan.answer)
        running.until(STEPS)
        if name != "undisturbed":
            running.preempt()
        running.until(STEPS + plan.answer)
        if name == "undisturbed":
            expected = running.tokens[len(prompt) :]
        require_equal(running.tokens[len(prompt) :], expected, f"{policy}, {name}")


def _measure(plan: TiersPlan, policy: str) -> list[Row]:
    engines = _engines(plan, plan.dtype)
    del engines["undisturbed"]
    seeds = dict.fromkeys(MODES, 0)

    def once(mode: str) -> Row:
        llm = engines[mode]
        seeds[mode] += 1
        running = Running(llm, _prompt(plan, llm, seeds[mode]), plan.policy(policy), STEPS + 4)
        running.until(STEPS - 1)
        started = perf_counter()
        running.until(STEPS)
        step_s = perf_counter() - started
        blocks = llm.engine.memory.pool.num_in_use
        before, swaps = _moved(llm), llm.engine.totals.swaps
        spent = running.preempt()
        assert llm.engine.totals.swaps - swaps == (mode == "swap"), f"{mode}: {llm.engine.totals.swaps} swaps"
        running.end()
        return {"s": spent, "step_s": step_s, "blocks": blocks, "bytes_moved": _moved(llm) - before}

    found = alternate({mode: lambda mode=mode: once(mode) for mode in MODES}, plan.rounds)  # type: ignore[misc]
    again = median(each["s"] for each in found["recompute"])
    return [
        {
            **facts(plan),
            "policy": policy,
            "budget": None if policy == "full" else plan.budget,
            "mode": mode,
            "ms": 1e3 * median(each["s"] for each in found[mode]),
            "times_ms": [1e3 * each["s"] for each in found[mode]],
            "step_ms": 1e3 * median(each["step_s"] for each in found[mode]),
            "blocks": found[mode][0]["blocks"],
            "bytes_moved": found[mode][0]["bytes_moved"],
            "ratio": again / median(each["s"] for each in found[mode]),
            "kernels": engines[mode].engine.kernels,
        }
        for mode in MODES
    ]


def _moved(llm: LLM) -> int:
    """Bytes, there and back."""
    stats = llm.engine.tier_stats()
    assert stats is not None, "it has a host tier"
    return stats.moves.out_bytes + stats.moves.load_bytes


def swap_table(rows: Sequence[Row]) -> Table:
    """For people."""
    columns: Columns = {
        "policy": "{policy}",
        "preempted": "{mode}",
        "blocks": "{blocks:,}",
        "MB moved": lambda row: f"{row['bytes_moved'] / 1e6:,.1f}",
        "a step, ms": "{step_ms:,.2f}",
        "to the next token, ms": "{ms:,.2f}",
        "computed again / this": "{ratio:,.1f} x",
    }
    title = f"a preemption at {rows[0]['tokens']:,} tokens, {rows[0]['model']}"
    return sheet(title, columns, rows, text_columns=2)
