"""`vllm serve` with and without the plugin, and `vllm bench serve` against both: goodput at equal memory.

Memory is the limit: the pool holds less than three requests at their ends, and all arrive within seconds.
Answers are judged if the prompts are look-ups: a question with a known answer follows a document, and an
answer is correct if it begins with the known one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.vllm_load import LATENCIES, ServeLoad, make_row, serving, turns_of, with_ratio
from kvreclaim.bench.vllm_pool import WITH, WITHOUT, option_of

LOADS = {
    "random": ServeLoad(),
    "text": ServeLoad(),
    "lookups": ServeLoad(requests=16, prompt=992, output=128, spread=0.0, num_blocks=97),
}
"""Load by --prompts."""


def run(plan: VllmPlan, console: Console) -> list[Row]:
    """Serve the load on both sides alternately. Returns: two rows, with `turns` after the medians.

    Raises: SkipPoint if vLLM fails; InvalidArgumentError if the plugin is not installed.
    """
    load = LOADS[plan.prompts]
    options = {WITHOUT: None, WITH: option_of(plan, plan.budget)}
    with serving(plan, load, options, console) as (servers, prompts):
        sides = {name: turns_of(plan, load, server, console, prompts) for name, server in servers.items()}
        found = alternate(sides, plan.turns)
    more = {"objectives": list(plan.goodput)}
    return [
        make_row(plan, load, system, found, figures=FIGURES, compared=COMPARED) | more for system in found
    ]


FIGURES = (
    *("completed", "output_throughput", "request_goodput", "preemptions", "blocks_freed"),
    *("mean_blocks", "peak_blocks", "mean_running", "duration"),
    *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("median", "p99")),
)
COMPARED = {"speed": "output_throughput", "goodput": "request_goodput"}


def _seconds(name: str) -> Callable[[Row], str]:
    """Median and 99th percentile, from milliseconds."""
    return lambda row: ", ".join(f"{row[f'{kind}_{name}_ms'] / 1000:.3g}" for kind in ("median", "p99"))


COLUMNS: Columns = {
    "system": lambda row: (
        row["system"] + (f", {row['policy']}, budget {row['budget']}" if row["budget"] else "")
    ),
    "answers": "{completed:.0f}",
    "right": "{right:.3f}",
    "goodput, requests/s": with_ratio("{request_goodput:.3f}", "goodput_ratio"),
    "output tokens/s": with_ratio("{output_throughput:.1f}", "speed_ratio"),
    "first token, s": _seconds("ttft"),
    "per token, s": _seconds("tpot"),
    "to the end, s": _seconds("e2el"),
    "preempted": "{preemptions:.0f}",
    "running": "{mean_running:.1f}",
    "blocks: mean, maximum": "{mean_blocks:.0f}, {peak_blocks:.0f}",
}


def serve_table(rows: Sequence[Row]) -> str:
    """Format the table in Markdown: latencies are median and 99th percentile."""
    return markdown(COLUMNS, cells(COLUMNS, rows))
