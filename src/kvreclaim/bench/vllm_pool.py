"""vLLM with and without the plugin: the same requests, all at once, in the same pool.

Both sides are vLLM's own engine in separate processes, eager, with one block size; only the side with the
plugin is started with `kv_compression`. Steps and preemptions do not depend on the machine; seconds do. The
requests are random prompts with end tokens ignored, so both sides generate equally many tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems.vllm_peer import VllmProcess, kv_bytes_per_token
from kvreclaim.checks import require
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model_paths import statistics_beside
from kvreclaim.outputs import writing

BLOCK_SIZE = 32
"""Smallest block size that vLLM's CPU attention takes for all models; tokens."""
WITHOUT, WITH = "vLLM", "vLLM + kvreclaim"
POINTS = 400
"""Points of a stored timeline."""


@dataclass(frozen=True, slots=True)
class PoolCase:
    """Requests of (prompt + output) tokens, all sent at once.

    num_blocks: as vLLM's --num-gpu-blocks-override, one of them its null block
    rounds:     number of times that each side serves them, alternating
    """

    requests: int
    prompt: int
    output: int
    num_blocks: int
    budget: int
    rounds: int = 1

    @property
    def name(self) -> str:
        return f"{self.requests} x ({self.prompt:,} + {self.output:,})"


CASES = {
    "small": PoolCase(requests=10, prompt=800, output=400, num_blocks=130, budget=256, rounds=3),
    "large": PoolCase(requests=32, prompt=2048, output=2048, num_blocks=769, budget=512),
}


class VllmSide:
    """One engine and its requests.

    option: vLLM's --additional-config; plugin: whether vLLM loads it at all
    Raises: SkipPoint if vLLM fails; InvalidArgumentError if the plugin is not as requested.
    """

    def __init__(
        self, plan: VllmPlan, case: PoolCase, option: Row | None = None, *, plugin: bool = True
    ) -> None:
        pool_bytes = case.num_blocks * BLOCK_SIZE * kv_bytes_per_token(plan.model, 2)
        self.case, self.process = case, VllmProcess(plan.python, plan.threads, pool_bytes, plugin=plugin)
        self.close = self.process.close
        try:
            self.facts = self.process.load(
                plan.setup,
                max_model_len=case.prompt + case.output,
                max_num_seqs=case.requests,
                num_gpu_blocks_override=case.num_blocks,
                block_size=BLOCK_SIZE,
                additional_config=option or {},
            )
            ours = self.facts["scheduler"] != "Scheduler"
            require(
                self.facts["plugin"] is plugin and ours is (option is not None),
                f"{str(plan.python)!r} {'does not load' if plugin else 'loads'} kvreclaim's plugin "
                f"(scheduler: {self.facts['scheduler']}); run `make vllm-env`, which installs it there.",
            )
        except BaseException:
            self.close()
            raise

    def serve(self, output: int | None = None) -> Row:
        """Return the worker's answer for the case's requests, or for fewer output tokens."""
        case = self.case
        return self.process.serve(case.requests, case.prompt, output or case.output)


def option_of(plan: VllmPlan, budget: int) -> Row:
    """vLLM's --additional-config for this budget."""
    stats = plan.stats or statistics_beside(plan.model)
    settings = {"policy": plan.policy, "budget": budget, "interval": plan.interval}
    return {"kv_compression": settings | ({"stats": str(stats.absolute())} if stats.is_file() else {})}


def run(plan: VllmPlan, console: Console) -> tuple[list[Row], dict[str, str]]:
    """Serve each of the plan's cases but "cost" on both sides.

    Returns: rows, two a case, and the versions of vLLM's environment.
    Raises: SkipPoint where vLLM fails; InvalidArgumentError where the plugin is not installed.
    """
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for case in (CASES[name] for name in plan.cases if name in CASES):
        with ExitStack() as stack:
            without = stack.enter_context(closing(VllmSide(plan, case, plugin=False)))
            ours = stack.enter_context(closing(VllmSide(plan, case, option_of(plan, case.budget))))
            versions = ours.process.versions()
            rows += _both(plan, case, {WITHOUT: without, WITH: ours}, console)
    return rows, versions


def _both(plan: VllmPlan, case: PoolCase, sides: dict[str, VllmSide], console: Console) -> list[Row]:
    def serve(name: str) -> Row:
        answer = sides[name].serve()
        console.print(f"{case.name}, {name}: {answer['elapsed_s']:.1f} s", style="dim")
        return answer

    for side in sides.values():
        side.serve(output=2)  # one-time work: compiling, touching memory
    answers = alternate({name: partial(serve, name) for name in sides}, case.rounds)
    rows = [_row(plan, case, name, answers[name]) for name in sides]
    base = rows[0]
    for row in rows:
        row["steps_ratio"] = base["steps"] / row["steps"]
        row["speed_ratio"] = row["tokens_per_s"] / base["tokens_per_s"]
    return rows


def _row(plan: VllmPlan, case: PoolCase, system: str, answers: Sequence[Row]) -> Row:
    """Use the first answer's steps, which are equal in all, and the median of the seconds."""
    first = answers[0]
    if len({len(answer["at_s"]) for answer in answers}) != 1:
        raise RuntimeError(f"{system} took different numbers of steps for the same requests")
    elapsed_s = median(answer["elapsed_s"] for answer in answers)
    return {
        "case": case.name,
        "system": system,
        **plan.facts(),
        "policy": plan.policy if system == WITH else None,
        "budget": case.budget if system == WITH else None,
        "interval": plan.interval if system == WITH else None,
        "block_size": BLOCK_SIZE,
        "num_blocks": case.num_blocks - 1,
        "requests": case.requests,
        "prompt": case.prompt,
        "output": case.output,
        "rounds": len(answers),
        "steps": len(first["at_s"]),
        "preemptions": first["preemptions"],
        "mean_running": fmean(first["running"]),
        "max_running": int(max(first["running"])),
        "mean_blocks": fmean(first["blocks"]),
        "peak_blocks": int(max(first["blocks"])),
        "blocks_left": first["left"],
        "decoding": first["decoding"],
        "after_pass": first["after_pass"],
        "elapsed_s": elapsed_s,
        "all_elapsed_s": [answer["elapsed_s"] for answer in answers],
        "tokens_per_s": case.requests * case.output / elapsed_s,
        "reclaim": first["reclaim"],
        "timeline": thin(first),
    }


def thin(answer: Row, points: int = POINTS) -> Row:
    """The timeline at equally distant steps, the last one included."""
    last = len(answer["at_s"]) - 1
    kept = sorted({round(i * last / max(1, points - 1)) for i in range(points)}) if last > 0 else [0]
    return {name: [answer[name][i] for i in kept] for name in ("at_s", "running", "waiting", "blocks")}


def _with_ratio(figure: str, ratio: str) -> Callable[[Row], str]:
    """Format the figure and, for the side with the plugin, its ratio to the other's."""
    return lambda row: (f"{figure} ({ratio})" if row["budget"] else figure).format_map(row)


COLUMNS: Columns = {
    "requests": "{case}",
    "pool, blocks of 32": "{num_blocks:,}",
    "system": lambda row: row["system"] + (f", budget {row['budget']}" if row["budget"] else ""),
    "steps": _with_ratio("{steps:,}", "{steps_ratio:.2f} x fewer"),
    "preempted": "{preemptions}",
    "running: mean, maximum": "{mean_running:.1f}, {max_running}",
    "blocks: mean, maximum": "{mean_blocks:,.0f}, {peak_blocks:,}",
    "seconds": "{elapsed_s:,.1f}",
    "tokens/s": _with_ratio("{tokens_per_s:,.0f}", "{speed_ratio:.2f} x"),
}


def pool_table(rows: Sequence[Row]) -> str:
    """Format the table in Markdown."""
    return markdown(COLUMNS, cells(COLUMNS, rows))


def block_lines(rows: Sequence[Row]) -> list[str]:
    """Blocks that one request holds, and its budget, for the rows with the plugin."""
    return [_block_line(row) for row in rows if row["budget"]]


def _block_line(row: Row) -> str:
    low, high = (
        blocks_for(tokens, BLOCK_SIZE) for tokens in (row["budget"], row["budget"] + row["interval"])
    )
    return (
        f"{row['case']}: a request holds at most {row['after_pass']} blocks after a pass (budget: {low}) "
        f"and {row['decoding']} between two (budget + interval: {high}); "
        f"{row['blocks_left']} are in use at the end."
    )


COLORS = {WITHOUT: "#d62728", WITH: "#2ca02c"}


def pool_chart(rows: Sequence[Row], out: Path) -> None:
    """A column for each case: blocks in use above, running requests below, over seconds."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(5.2 * len(cases), 5.2), layout="constrained")
    grid = figure.subplots(2, len(cases), squeeze=False, sharex="col")
    for i, case in enumerate(cases):
        own = [row for row in rows if row["case"] == case]
        _panel(grid[0][i], own, "blocks", "blocks in use")
        grid[0][i].axhline(
            own[0]["num_blocks"], color="#7f7f7f", linestyle="--", linewidth=1, label="the pool"
        )
        grid[0][i].set_title(f"{case} tokens, budget {own[-1]['budget']}", fontsize=10)
        _panel(grid[1][i], own, "running", "running requests")
        grid[1][i].set_xlabel("seconds")
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    with writing(out):
        figure.savefig(out, dpi=120)


def _panel(axis: Axes, rows: Sequence[Row], what: str, label: str) -> None:
    for row in rows:
        line = row["timeline"]
        axis.plot(line["at_s"], line[what], color=COLORS[row["system"]], linewidth=1.2, label=row["system"])
    axis.set_ylim(bottom=0)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.3)
    axis.set_ylabel(label)
