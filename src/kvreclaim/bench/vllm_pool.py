"""vLLM with and without the plugin: the same requests, all at once, in the same pool.

Both sides are vLLM's own engine in processes of their own, eager, one block size; only the side with the
plugin is started with `kv_compression`. Steps and preemptions do not depend on the machine; seconds do. The
requests are random prompts with end tokens ignored, so both sides generate equally many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from kvreclaim.bench.common import Row, alternate, text
from kvreclaim.bench.systems.base import CHUNK
from kvreclaim.bench.systems.vllm_peer import VllmProcess, kv_bytes_per_token
from kvreclaim.checks import require
from kvreclaim.engine.face.llm import STATS_FILE
from kvreclaim.memory.blocks import blocks_for

BLOCK_SIZE = 32
"""The smallest that vLLM's CPU attention takes for all models; tokens."""
WITHOUT, WITH = "vLLM", "vLLM + kvreclaim"
POINTS = 400
"""Points of a timeline that is kept."""


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of (prompt + output) tokens, all sent at once.

    num_blocks: as vLLM's --num-gpu-blocks-override, one of them its null block
    rounds:     times that each side serves them, in turns
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

    @property
    def length(self) -> int:
        return self.prompt + self.output

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1


SMALL = Case(requests=10, prompt=800, output=400, num_blocks=130, budget=256, rounds=3)
LARGE = Case(requests=32, prompt=2048, output=2048, num_blocks=769, budget=512)
CASES = {"small": SMALL, "large": LARGE}


@dataclass(frozen=True, slots=True)
class VllmPlan:
    """What all measurements beside vLLM share. stats: of the model's queries; None takes its own file."""

    model: Path
    python: Path
    dtype: str = "bfloat16"
    threads: int = 1
    policy: str = "query_mixture"
    interval: int = 128
    stats: Path | None = None

    def option(self, budget: int) -> dict[str, Any]:
        """vLLM's --additional-config for this budget."""
        stats = self.stats or self.model / STATS_FILE
        asked = {"policy": self.policy, "budget": budget, "interval": self.interval}
        return {"kv_compression": asked | ({"stats": str(stats.absolute())} if stats.is_file() else {})}

    def start(self, case: Case, option: dict[str, Any] | None = None, *, plugin: bool = True) -> VllmSide:
        """An engine with the case's pool. plugin: whether vLLM loads it at all.

        Raises: SkipPoint where vLLM fails; InvalidArgumentError where the plugin is not what was asked for.
        """
        pool_bytes = case.num_blocks * BLOCK_SIZE * kv_bytes_per_token(self.model, 2)
        side = VllmSide(VllmProcess(self.python, self.threads, pool_bytes, plugin=plugin), case)
        try:
            side.load(self, option)
            ours = side.facts["scheduler"] != "Scheduler"
            require(
                side.facts["plugin"] is plugin and ours is (option is not None),
                f"{str(self.python)!r} {'does not load' if plugin else 'loads'} kvreclaim's plugin "
                f"(scheduler: {side.facts['scheduler']}); run `make vllm-env`, which installs it there.",
            )
        except BaseException:
            side.close()
            raise
        return side


class VllmSide:
    """One engine and the requests that it is asked to serve."""

    def __init__(self, process: VllmProcess, case: Case) -> None:
        self.process, self.case = process, case
        self.facts: dict[str, Any] = {}

    def load(self, plan: VllmPlan, option: dict[str, Any] | None) -> None:
        self.facts = self.process.ask(
            "load",
            model=str(plan.model),
            dtype=plan.dtype,
            max_len=self.case.length,
            batch=self.case.requests,
            num_blocks=self.case.num_blocks,
            block_size=BLOCK_SIZE,
            eager=True,
            chunk=CHUNK,
            additional_config=option,
        )

    def serve(self, output: int | None = None) -> dict[str, Any]:
        """The worker's answer for the case's requests, or for fewer output tokens."""
        draw = {
            "batch": self.case.requests,
            "context": self.case.prompt,
            "vocab_size": self.facts["vocab_size"],
            "seed": 11,
        }
        return dict(self.process.ask("serve", draw=draw, max_tokens=output or self.case.output))

    def versions(self) -> dict[str, str]:
        return {name: str(value) for name, value in self.facts.items() if name.startswith("vllm")}

    def close(self) -> None:
        self.process.close()


def run(
    plan: VllmPlan, cases: Iterable[Case], console: Console | None = None
) -> tuple[list[Row], dict[str, str]]:
    """Serve each case on both sides.

    Returns: rows, two a case, and the versions of vLLM's environment.
    Raises: SkipPoint where vLLM fails; InvalidArgumentError where the plugin is not installed.
    """
    rows: list[Row] = []
    versions: dict[str, str] = {}
    for case in cases:
        sides = {WITHOUT: plan.start(case, plugin=False)}
        try:
            sides[WITH] = plan.start(case, plan.option(case.budget))
            versions = sides[WITH].versions()
            rows += _both(plan, case, sides, console)
        finally:
            for side in sides.values():
                side.close()
    return rows, versions


def _both(plan: VllmPlan, case: Case, sides: dict[str, VllmSide], console: Console | None) -> list[Row]:
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}

    def serve(name: str) -> float:
        """Seconds."""
        answers[name].append(sides[name].serve())
        if console is not None:
            console.print(f"{case.name}, {name}: {answers[name][-1]['elapsed_s']:.1f} s", style="dim")
        return float(answers[name][-1]["elapsed_s"])

    for side in sides.values():
        side.serve(output=2)  # what is done once: compiling, touching memory
    alternate({name: partial(serve, name) for name in sides}, case.rounds)
    rows = [_row(plan, case, name, answers[name]) for name in sides]
    base = rows[0]
    for row in rows:
        row["steps_ratio"] = base["steps"] / row["steps"]
        row["speed_ratio"] = row["tokens_per_s"] / base["tokens_per_s"]
    return rows


def _row(plan: VllmPlan, case: Case, system: str, answers: Sequence[dict[str, Any]]) -> Row:
    """The first answer's steps, which are every answer's, and the median of the seconds."""
    first = answers[0]
    if len({len(answer["at_s"]) for answer in answers}) != 1:
        raise RuntimeError(f"{system} took different numbers of steps for the same requests")
    elapsed_s = median(answer["elapsed_s"] for answer in answers)
    return {
        "case": case.name,
        "system": system,
        "model": plan.model.name,
        "dtype": plan.dtype,
        "threads": plan.threads,
        "policy": plan.policy if system == WITH else None,
        "budget": case.budget if system == WITH else None,
        "interval": plan.interval if system == WITH else None,
        "block_size": BLOCK_SIZE,
        "num_blocks": case.usable_blocks,
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


def thin(answer: dict[str, Any], points: int = POINTS) -> Row:
    """The timeline at equally distant steps, the last one included."""
    last = len(answer["at_s"]) - 1
    kept = sorted({round(i * last / max(1, points - 1)) for i in range(points)}) if last > 0 else [0]
    return {name: [answer[name][i] for i in kept] for name in ("at_s", "running", "waiting", "blocks")}


HEADINGS = (
    "requests",
    "pool, blocks of 32",
    "system",
    "steps",
    "preempted",
    "running: mean, most",
    "blocks: mean, most",
    "seconds",
    "tokens/s",
)


def pool_cells(rows: Sequence[Row]) -> list[list[str]]:
    """A line for each row."""
    return [
        [
            row["case"],
            f"{row['num_blocks']:,}",
            row["system"] + (f", budget {row['budget']}" if row["budget"] else ""),
            f"{row['steps']:,}" + (f" ({row['steps_ratio']:.2f} x fewer)" if row["budget"] else ""),
            str(row["preemptions"]),
            f"{row['mean_running']:.1f}, {row['max_running']}",
            f"{row['mean_blocks']:,.0f}, {row['peak_blocks']:,}",
            text(row["elapsed_s"], 1),
            text(row["tokens_per_s"], 0) + (f" ({row['speed_ratio']:.2f} x)" if row["budget"] else ""),
        ]
        for row in rows
    ]


def block_lines(rows: Sequence[Row]) -> list[str]:
    """What one request holds, beside what its budget says; of the rows with the plugin."""
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
