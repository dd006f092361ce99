"""`vllm serve` with and without the plugin, and `vllm bench serve` against both: goodput at equal memory.

Memory is what binds: the pool holds less than three requests at their ends, and all come within seconds. What
the answers are worth is looked at where the prompts are look-ups: a question of which the answer is known
stands behind a document, and an answer is right if it begins with that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from statistics import fmean, median

from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.vllm_load import LATENCIES, ServeLoad, ratio, run_turn, serving
from kvreclaim.bench.vllm_pool import BLOCK_SIZE, WITH, WITHOUT, option_of

LOADS = {
    "random": ServeLoad(),
    "text": ServeLoad(),
    "lookups": ServeLoad(requests=16, prompt=992, output=128, spread=0.0, num_blocks=97),
}
"""By --prompts."""


def run(plan: VllmPlan, console: Console) -> list[Row]:
    """Serve the load on both sides in turns. Returns: two rows, with `turns` behind the medians.

    Raises: SkipPoint where vLLM fails; InvalidArgumentError where the plugin is not installed.
    """
    load = LOADS[plan.prompts]
    options = {WITHOUT: None, WITH: option_of(plan, load.budget)}
    with serving(plan, load, options, console) as (servers, prompts):
        turns = {
            name: partial(run_turn, plan, load, server, console, zip(count(plan.seed), prompts, strict=False))
            for name, server in servers.items()
        }
        found = alternate(turns, plan.turns)
    return _rows(plan, load, found)


def _rows(plan: VllmPlan, load: ServeLoad, found: dict[str, list[Row]]) -> list[Row]:
    rows = []
    base = found[WITHOUT]
    for system, turns in found.items():
        rows.append(
            {
                "system": system,
                **plan.facts(),
                "policy": plan.policy if system == WITH else None,
                "budget": load.budget if system == WITH else None,
                "interval": plan.interval if system == WITH else None,
                "num_blocks": load.num_blocks - 1,
                "block_size": BLOCK_SIZE,
                "rate": plan.rate,
                "prompts": plan.prompts,
                "objectives": list(plan.goodput),
                "speed_ratio": ratio(base, turns, "output_throughput"),
                "goodput_ratio": ratio(base, turns, "request_goodput"),
                **{name: median(turn[name] for turn in turns) for name in FIGURES},
                "right": fmean(right)
                if (right := [one for turn in turns for one in turn["right"]])
                else None,
                "turns": turns,
            }
        )
    return rows


FIGURES = (
    *("completed", "output_throughput", "request_goodput", "preemptions", "blocks_freed"),
    *("mean_blocks", "peak_blocks", "mean_running", "duration"),
    *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("median", "p99")),
)


def _beside(figure: str, ratio: str) -> Callable[[Row], str]:
    """The figure, and for the side with the plugin what it is of the other's, if that has any."""
    both = f"{figure} ({{{ratio}:.2f}} x)"
    return lambda row: (both if row["budget"] and row[ratio] is not None else figure).format_map(row)


def _seconds(name: str) -> Callable[[Row], str]:
    """Median and 99th percentile, of milliseconds."""
    return lambda row: ", ".join(f"{row[f'{kind}_{name}_ms'] / 1000:.3g}" for kind in ("median", "p99"))


COLUMNS: Columns = {
    "system": lambda row: (
        row["system"] + (f", {row['policy']}, budget {row['budget']}" if row["budget"] else "")
    ),
    "answers": "{completed:.0f}",
    "right": "{right:.3f}",
    "goodput, requests/s": _beside("{request_goodput:.3f}", "goodput_ratio"),
    "output tokens/s": _beside("{output_throughput:.1f}", "speed_ratio"),
    "first token, s": _seconds("ttft"),
    "per token, s": _seconds("tpot"),
    "to the end, s": _seconds("e2el"),
    "preempted": "{preemptions:.0f}",
    "running": "{mean_running:.1f}",
    "blocks: mean, most": "{mean_blocks:.0f}, {peak_blocks:.0f}",
}


def serve_table(rows: Sequence[Row]) -> str:
    """The table for a document, in Markdown: latencies are median and 99th percentile."""
    return markdown(COLUMNS, cells(COLUMNS, rows))
