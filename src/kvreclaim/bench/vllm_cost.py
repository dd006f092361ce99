"""What the plugin costs a vLLM that does not need it.

Four engines serve the same requests in turns, each in a process that stays: `absent` (vLLM does not load the
plugin), `absent again` (the same, which shows what of a difference is noise), `installed` (loaded,
compression not asked for) and `never reached` (compression on, its budget beyond every request). The engine
core runs in the process that is timed, on a small model, so the share of scheduling in a step is larger than
it would be elsewhere. Each round gives one ratio to `absent`: tokens/s, and seconds of processor time, which
other processes disturb less. The processes are started afresh several times, since where a process's memory
happens to lie costs more than what is looked for. The tokens must be the same in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from rich.console import Console

from kvreclaim.bench.common import Row, text
from kvreclaim.bench.vllm_pool import BLOCK_SIZE, Case, VllmPlan, VllmSide
from kvreclaim.memory.blocks import blocks_for

ABSENT, AGAIN, INSTALLED, UNREACHED = "absent", "absent again", "installed", "never reached"
BUDGET = 1 << 20
"""Beyond every request."""


@dataclass(frozen=True, slots=True)
class CostPlan:
    """starts: of all processes afresh; rounds: of each start, after one that is not counted."""

    vllm: VllmPlan
    starts: int = 3
    rounds: int = 24
    requests: int = 8
    prompt: int = 128
    output: int = 64

    @property
    def case(self) -> Case:
        """A pool in which all of them fit twice."""
        blocks = 2 * self.requests * blocks_for(self.prompt + self.output, BLOCK_SIZE) + 1
        return Case(self.requests, self.prompt, self.output, blocks, BUDGET)


def run(plan: CostPlan, console: Console | None = None) -> list[Row]:
    """Measure. Returns: a row for each engine but `absent`. Raises: RuntimeError where tokens differ."""
    ratios: dict[str, list[Row]] = {name: [] for name in (AGAIN, INSTALLED, UNREACHED)}
    for start in range(plan.starts):
        with ExitStack() as stack:
            sides = _start(plan, stack)
            for answers in _rounds(plan, sides):
                for name, found in ratios.items():
                    found.append(_ratio(answers[ABSENT], answers[name], start))
        if console is not None:
            console.print(f"start {start + 1} of {plan.starts} done", style="dim")
    return [_row(plan, name, found) for name, found in ratios.items()]


def _start(plan: CostPlan, stack: ExitStack) -> dict[str, VllmSide]:
    case, sides = plan.case, {}
    for name in (ABSENT, AGAIN, INSTALLED, UNREACHED):
        option = plan.vllm.option(BUDGET) if name == UNREACHED else None
        sides[name] = plan.vllm.start(case, option, plugin=name in (INSTALLED, UNREACHED))
        stack.callback(sides[name].close)
    return sides


def _rounds(plan: CostPlan, sides: dict[str, VllmSide]) -> Iterator[dict[str, dict[str, Any]]]:
    """Answers by name, of every round but the first; each round begins with another engine."""
    names = list(sides)
    for turn in range(plan.rounds + 1):
        order = names[turn % len(names) :] + names[: turn % len(names)]
        answers = {name: sides[name].serve() for name in order}
        if len({answer["digest"] for answer in answers.values()}) != 1:
            raise RuntimeError(
                f"the engines drew different tokens: { {n: a['digest'] for n, a in answers.items()} }"
            )
        if turn > 0:
            yield answers


def _ratio(base: dict[str, Any], other: dict[str, Any], start: int) -> Row:
    return {
        "start": start,
        "speed": base["elapsed_s"] / other["elapsed_s"],
        "cpu": other["cpu_s"] / base["cpu_s"],
        "base_s": base["elapsed_s"],
        "other_s": other["elapsed_s"],
    }


def _row(plan: CostPlan, name: str, found: Sequence[Row]) -> Row:
    tokens = plan.requests * plan.output
    return {
        "engine": name,
        "model": plan.vllm.model.name,
        "policy": plan.vllm.policy if name == UNREACHED else None,
        "requests": plan.requests,
        "prompt": plan.prompt,
        "output": plan.output,
        "starts": plan.starts,
        "rounds": len(found),
        "absent_tokens_per_s": tokens / median(one["base_s"] for one in found),
        "speed": spread_of([one["speed"] for one in found]),
        "fastest": median(_fastest(found, start) for start in range(plan.starts)),
        "cpu": spread_of([one["cpu"] for one in found]),
        "ratios": list(found),
    }


def _fastest(found: Sequence[Row], start: int) -> float:
    """Speed of the fastest round of a start to that of `absent`'s: what disturbs a round makes it slower."""
    own = [one for one in found if one["start"] == start]
    return float(min(one["base_s"] for one in own) / min(one["other_s"] for one in own))


def spread_of(values: Sequence[float]) -> Row:
    """Median, quartiles, and a 95 % interval of the median by order statistics (all values where there are
    few)."""
    ordered = sorted(values)
    count = len(ordered)
    reach = 0.98 * count**0.5  # 1.96 standard deviations of Binomial(count, 1/2)
    low = max(0, int(count / 2 - reach))
    high = min(count - 1, int(count / 2 + reach))
    quartiles = quantiles(ordered, n=4) if count > 1 else [ordered[0]] * 3
    return {
        "median": median(ordered),
        "quartiles": [quartiles[0], quartiles[2]],
        "interval": [ordered[low], ordered[high]],
    }


HEADINGS = (
    "engine",
    "rounds",
    "tokens/s against absent",
    "95 % of the median",
    "quartiles of a round",
    "fastest rounds",
    "processor time against absent",
    "95 % of the median",
)


def cost_cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each row."""
    return [
        [
            row["engine"],
            str(row["rounds"]),
            _change(row["speed"]["median"]),
            _range(row["speed"]["interval"]),
            _range(row["speed"]["quartiles"]),
            _change(row["fastest"]),
            _change(row["cpu"]["median"]),
            _range(row["cpu"]["interval"]),
        ]
        for row in rows
    ]


def _change(ratio: float) -> str:
    value = 100 * (ratio - 1)
    return ("+" if value >= 0 else "") + text(value, 2, " %")


def _range(pair: Sequence[float]) -> str:
    return " to ".join(_change(value) for value in pair)
