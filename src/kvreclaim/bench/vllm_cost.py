"""The cost of the plugin in a vLLM that does not use it.

Four engines serve the same requests alternately, each in a persistent process: `absent` (vLLM does not load
the plugin), `absent again` (a repetition that shows the noise), `installed` (loaded, without compression) and
`never reached` (compression on, with a budget above every request). The engine core runs in the timed
process, on a small model, so the share of scheduling in a step is larger than usual. Each round gives one
ratio to `absent`: tokens/s, and seconds of processor time, which other processes disturb less. The processes
are restarted several times, because their memory layout affects speed more than the plugin. The tokens must
be equal in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, closing
from statistics import median, quantiles

from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.vllm_pool import PoolCase, VllmSide, option_of

ABSENT, AGAIN, INSTALLED, UNREACHED = "absent", "absent again", "installed", "never reached"


CASE = PoolCase(requests=8, prompt=128, output=64, num_blocks=97, budget=1 << 20)
"""A pool in which all requests fit twice; a budget above every request."""


def run(plan: VllmPlan, console: Console) -> list[Row]:
    """Measure. Returns: a row for each engine but `absent`. Raises: RuntimeError if tokens differ."""
    ratios: dict[str, list[Row]] = {name: [] for name in (AGAIN, INSTALLED, UNREACHED)}
    for start in range(plan.starts):
        with ExitStack() as stack:
            answers = _rounds(plan, _start(plan, stack))
        for name, found in ratios.items():
            pairs = zip(answers[ABSENT], answers[name], strict=True)
            found += [_ratio(base, other, start) for base, other in pairs]
        console.print(f"start {start + 1} of {plan.starts} done", style="dim")
    return [_row(plan, name, found) for name, found in ratios.items()]


def _start(plan: VllmPlan, stack: ExitStack) -> dict[str, VllmSide]:
    sides = {}
    for name in (ABSENT, AGAIN, INSTALLED, UNREACHED):
        option = option_of(plan, CASE.budget) if name == UNREACHED else None
        side = VllmSide(plan, CASE, option, plugin=name in (INSTALLED, UNREACHED))
        sides[name] = stack.enter_context(closing(side))
    return sides


def _rounds(plan: VllmPlan, sides: dict[str, VllmSide]) -> dict[str, list[Row]]:
    """Answers of every round but the first; each round starts with another engine."""
    answers = alternate({name: side.serve for name, side in sides.items()}, plan.rounds + 1)
    if len({answer["digest"] for each in answers.values() for answer in each}) != 1:
        raise RuntimeError(
            f"the engines drew different tokens: { {n: a[0]['digest'] for n, a in answers.items()} }"
        )
    return {name: each[1:] for name, each in answers.items()}


def _ratio(base: Row, other: Row, start: int) -> Row:
    return {
        "start": start,
        "speed": base["elapsed_s"] / other["elapsed_s"],
        "cpu": other["cpu_s"] / base["cpu_s"],
        "base_s": base["elapsed_s"],
        "other_s": other["elapsed_s"],
    }


def _row(plan: VllmPlan, name: str, found: Sequence[Row]) -> Row:
    tokens = CASE.requests * CASE.output
    return {
        "engine": name,
        "model": plan.model.name,
        "policy": plan.policy if name == UNREACHED else None,
        "requests": CASE.requests,
        "prompt": CASE.prompt,
        "output": CASE.output,
        "starts": plan.starts,
        "rounds": len(found),
        "absent_tokens_per_s": tokens / median(one["base_s"] for one in found),
        "speed": spread_of([one["speed"] for one in found]),
        "fastest": median(_fastest(found, start) for start in range(plan.starts)),
        "cpu": spread_of([one["cpu"] for one in found]),
        "ratios": list(found),
    }


def _fastest(found: Sequence[Row], start: int) -> float:
    """Ratio of a start's fastest round to that of `absent`: disturbances only slow rounds."""
    own = [one for one in found if one["start"] == start]
    return float(min(one["base_s"] for one in own) / min(one["other_s"] for one in own))


def spread_of(values: Sequence[float]) -> Row:
    """Median, quartiles, and a 95 % interval of the median by order statistics (all values if there are
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


def cost_table(rows: Sequence[Row]) -> str:
    """Format the table in Markdown."""
    return markdown(COLUMNS, cells(COLUMNS, rows))


def _change(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


def _range(pair: Sequence[float]) -> str:
    return " to ".join(_change(value) for value in pair)


COLUMNS: Columns = {
    "engine": "{engine}",
    "rounds": "{rounds}",
    "tokens/s against absent": lambda row: _change(row["speed"]["median"]),
    "95 % of the median": lambda row: _range(row["speed"]["interval"]),
    "quartiles of a round": lambda row: _range(row["speed"]["quartiles"]),
    "fastest rounds": lambda row: _change(row["fastest"]),
    "processor time against absent": lambda row: _change(row["cpu"]["median"]),
    "95 % of its median": lambda row: _range(row["cpu"]["interval"]),
}
