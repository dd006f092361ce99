"""The cost of compression with ample memory: speed and the time between tokens.

The pool holds all requests whole, so that none is preempted; with the plugin every request exceeds its
budget. The third side is the second one's server while a viewer reads the feed of its live page. Prefix
caching is off, as one of these two would find what the other has computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from threading import Event, Thread
from urllib.request import urlopen

from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems.server_process import free_port
from kvreclaim.bench.vllm_load import ServeLoad, make_row, serving, turns_of, with_ratio
from kvreclaim.bench.vllm_pool import WITH, WITHOUT, option_of

WATCHED = f"{WITH}, watched"
LOAD = ServeLoad(num_blocks=12 * 50 + 1, prefix_caching=False)
"""A request ends within 50 blocks."""
FEED_TIMEOUT_S = 60.0
"""The feed sends an event every second."""
FIGURES = (
    *("output_throughput", "median_itl_ms", "p99_itl_ms", "median_ttft_ms", "p99_ttft_ms", "preemptions"),
    *("passes", "pass_s", "duration", "mean_blocks", "peak_blocks", "total_output_tokens"),
)
COMPARED = {"speed": "output_throughput", "itl": "median_itl_ms", "p99_itl": "p99_itl_ms"}


def run(plan: VllmPlan, console: Console) -> list[Row]:
    """Serve the load on all sides alternately. Returns: three rows, with `turns` after the medians.

    Raises: SkipPoint if vLLM fails; InvalidArgumentError if the plugin is not installed; RuntimeError if
    the sides did not do the same work, or not under these circumstances.
    """
    port, option = free_port(), option_of(plan, plan.budget)
    option["kv_compression"]["page_port"] = port
    with serving(plan, LOAD, {WITHOUT: None, WITH: option}, console) as (servers, prompts):
        plain, ours, seen = (
            turns_of(plan, LOAD, servers[name], console, prompts) for name in (WITHOUT, WITH, WITH)
        )
        sides: dict[str, Callable[[], Row]] = {
            WITHOUT: plain,
            WITH: ours,
            WATCHED: partial(watched, port, seen),
        }
        found = alternate(sides, plan.turns)
    check(found)
    return [make_row(plan, LOAD, system, found, figures=FIGURES, compared=COMPARED) for system in found]


def watched(port: int, turn: Callable[[], Row]) -> Row:
    """Run the turn while the page's feed is read as fast as possible. frames: number received"""
    frames, over = 0, Event()

    def read() -> None:
        nonlocal frames
        with urlopen(f"http://127.0.0.1:{port}/page/feed", timeout=FEED_TIMEOUT_S) as feed:
            for line in feed:
                frames += line.startswith(b"data:")
                if over.is_set():
                    return

    viewer = Thread(target=read)
    viewer.start()
    try:
        return {**turn(), "frames": frames}
    finally:
        over.set()
        viewer.join()


def check(found: Mapping[str, Sequence[Row]]) -> None:
    """Raises: RuntimeError."""
    for turns in zip(*found.values(), strict=True):
        without, ours, seen = turns
        wrong = {
            "the sides answered different numbers of tokens": len(
                {one["total_output_tokens"] for one in turns}
            )
            > 1,
            "a request was preempted": any(one["preemptions"] for one in turns),
            "the plugin has not compressed": not min(ours["passes"], seen["passes"]),
            "passes ran without the plugin": without["passes"] > 0,
            "the viewer has seen no frame": not seen["frames"],
        }
        for what, holds in wrong.items():
            if holds:
                raise RuntimeError(f"in the turn with seed {without['seed']} {what}")


COLUMNS: Columns = {
    "system": "{system}",
    "right": "{right:.3f}",
    "output tokens/s": with_ratio("{output_throughput:.1f}", "speed_ratio"),
    "slowest to fastest turn": lambda row: (
        f"{min(row['speed_ratios']):.2f} to {max(row['speed_ratios']):.2f} x" if row["budget"] else "-"
    ),
    "between tokens, ms: p50": with_ratio("{median_itl_ms:.1f}", "itl_ratio"),
    "p99": with_ratio("{p99_itl_ms:.1f}", "p99_itl_ratio"),
    "passes": "{passes:.0f}",
    "seconds in them": "{pass_s:.2f}",
    "blocks: mean, maximum": "{mean_blocks:.0f}, {peak_blocks:.0f}",
}


def plenty_table(rows: Sequence[Row]) -> str:
    """Format the table in Markdown."""
    return markdown(COLUMNS, cells(COLUMNS, rows))
