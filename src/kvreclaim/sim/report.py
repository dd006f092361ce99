"""Figures of a simulation, by name, and their chart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvreclaim.memory.prefix.index import MISS_REASONS
from kvreclaim.outputs import writing
from kvreclaim.sim.cluster import SimulationResult
from kvreclaim.sim.request import RequestRecord
from kvreclaim.sim.scenario import Scenario

COLORS = ("#d62728", "#2ca02c", "#1f77b4", "#9467bd")
PANELS = (
    ("blocks", "blocks in use"),
    ("running", "running requests"),
    ("waiting", "waiting requests"),
    ("hit_rate", "found of the prompts"),
)


def chart(reports: Mapping[str, dict[str, Any]], out: Path) -> None:
    """reports: by the name of the run, what sim.report gave."""
    figure = Figure(figsize=(9, 9.5), layout="constrained")
    grid = figure.subplots(len(PANELS), 1, sharex=True)
    for axis, (what, label) in zip(grid, PANELS, strict=True):
        for color, (name, report) in zip(COLORS, reports.items(), strict=False):
            _line(axis, report["timeline"], what, name, color)
        axis.set_ylabel(label)
        axis.set_ylim(bottom=0)
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    first = next(iter(reports.values()))
    pool = first["num_blocks"] * first["replicas"]
    grid[0].axhline(pool, color="#7f7f7f", linestyle="--", linewidth=1, label="all pools")
    grid[-1].set_xlabel("simulated seconds")
    handles, labels = grid[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    title = (
        f"{first['trace']}: {first['requests']:,} requests, {first['replicas']} replicas, {first['router']}"
    )
    figure.suptitle(title, fontsize=11)
    with writing(out):
        figure.savefig(out, dpi=120)


def _line(axis: Axes, timeline: dict[str, list[Any]], what: str, name: str, color: str) -> None:
    points = [(t, y) for t, y in zip(timeline["at_s"], timeline[what], strict=True) if y is not None]
    axis.plot(
        [t for t, _ in points], [y for _, y in points], color=color, linewidth=1.1, label=name, alpha=0.85
    )


PERCENTILES = (50, 90, 99)
WINDOW = 16
NEAR = 0.9
"""Share of what the replicas can do from which small errors of the cost model become large ones."""
OFF = 0.1


def report(scenario: Scenario, *, sampled: bool = True) -> dict[str, Any]:
    """Run a scenario. Returns: all figures, ready for JSON."""
    outcome, wall_s = scenario.run(sampled=sampled)
    load = scenario.utilisation(outcome)
    bands = _bands(scenario) if load > NEAR else None
    return describe(scenario, outcome, wall_s) | {"utilisation": load, "bands": bands}


def _bands(scenario: Scenario) -> dict[str, Any]:
    """Return ranges of latencies with a step's base and key reads 10 % faster and slower."""
    runs = []
    for factor in (1 - OFF, 1.0, 1 + OFF):
        cost = scenario.cost
        cost = replace(cost, base=cost.base * factor, kv=cost.kv * factor)
        outcome, _ = replace(scenario, cost=cost).run()
        runs.append(spread(outcome.records))
    return {
        name: {
            key: [min(run[name][key] for run in runs), max(run[name][key] for run in runs)]
            for key in ("mean", "p50", "p99")
            if all(run[name] for run in runs)
        }
        for name in ("ttft_s", "tpot_s", "e2e_s")
    }


def distribution(values: Iterable[float]) -> dict[str, float]:
    """mean, p50, p90, p99 (linear between neighbours); empty for none."""
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return {}
    found = {"mean": float(array.mean())}
    at = np.percentile(array, PERCENTILES)
    return found | {f"p{p}": float(x) for p, x in zip(PERCENTILES, at, strict=True)}


def spread(records: Sequence[RequestRecord]) -> dict[str, dict[str, float]]:
    """Distributions over requests: to the first token, between tokens behind it, to the end, in the queue. In
    seconds."""
    return {
        "ttft_s": distribution(r.ttft_s for r in records),
        "tpot_s": distribution(x for r in records if (x := r.tpot_s) is not None),
        "e2e_s": distribution(r.e2e_s for r in records),
        "queue_s": distribution((r.scheduled_s or 0.0) - r.arrival_s for r in records),
    }


def describe(scenario: Scenario, outcome: SimulationResult, wall_s: float) -> dict[str, Any]:
    """Return all counts and times."""
    records, settings, trace = outcome.records, scenario.settings, scenario.trace
    replicas = outcome.replicas
    steps = sum(each.num_steps for each in replicas)
    count = len(records)
    return {
        "trace": trace.name,
        "requests": count,
        "refused": len(outcome.refused),
        "refused_by_reason": dict(outcome.why),
        "replicas": len(replicas),
        "router": scenario.router,
        "simulated_s": outcome.makespan_s,
        "wall_s": wall_s,
        "simulated_requests_per_min_per_core": count / wall_s * 60 if wall_s else None,
        **spread(records),
        "steps": steps,
        "leaps": sum(each.num_leaps for each in replicas),
        "mean_running": sum(each.running_steps for each in replicas) / steps if steps else 0.0,
        "busy": _busy(outcome),
        "output_tokens_per_s": _per_s(sum(r.num_output for r in records), outcome.makespan_s),
        **_preemptions(outcome),
        **_hits(outcome, knows=trace.knows_content),
        "blocks_freed": sum(each.blocks_freed_by_compression for each in outcome.memory),
        "passes": sum(each.num_passes for each in replicas),
        "pass_s": scenario.cost.compaction,
        "tokens_evicted": sum(each.tokens_evicted for each in replicas),
        "num_blocks": settings.num_blocks,
        "block_size": settings.block_size,
        "peak_blocks": max((each.peak_in_use for each in outcome.memory), default=0),
        "blocks_moved": sum(each.blocks_moved for each in replicas),
        "goodput": goodput(scenario, outcome),
        "money": money(scenario, outcome),
        "cost_model": dict(scenario.cost.facts),
        "timeline": timeline(outcome),
    }


def _busy(outcome: SimulationResult) -> float:
    """Share of the time in which replicas computed."""
    whole = outcome.makespan_s * len(outcome.replicas)
    return sum(each.busy_s for each in outcome.replicas) / whole if whole else 0.0


def _per_s(amount: float, seconds: float) -> float | None:
    return amount / seconds if seconds else None


def _preemptions(outcome: SimulationResult) -> dict[str, Any]:
    records = outcome.records
    return {
        "preemptions": outcome.preemptions.total(),
        "preemptions_by_reason": dict(outcome.preemptions),
        "swaps": sum(each.swaps for each in outcome.replicas),
        "preempted_requests": sum(r.preemptions > 0 for r in records),
        "recomputed_tokens": sum(r.recomputed_tokens for r in records),
    }


def _hits(outcome: SimulationResult, *, knows: bool) -> dict[str, Any]:
    """hit_rate: share of prompt tokens found in the cache; None if the trace does not know equal prompts."""
    queried = sum(each.prefix_query_tokens for each in outcome.memory)
    found = sum(each.prefix_hit_tokens for each in outcome.memory)
    misses = {name: sum(each.misses[name] for each in outcome.memory) for name in MISS_REASONS}
    return {
        "hit_rate": found / queried if queried and knows else None,
        "hit_tokens": found,
        "prompt_tokens": queried,
        "misses": {name: count for name, count in misses.items() if count},
        "prefix_evictions": sum(each.prefix_evictions for each in outcome.memory),
    }


def goodput(scenario: Scenario, outcome: SimulationResult) -> dict[str, Any] | None:
    """Requests that kept every target; None without targets. A refused one has kept none."""
    targets = scenario.targets
    if not targets:
        return None
    kept = sum(record.keeps(targets) for record in outcome.records)
    count = len(outcome.records) + len(outcome.refused)
    return {
        "targets": str(targets),
        "share": kept / count if count else 0.0,
        "requests_per_s": _per_s(kept, outcome.makespan_s),
    }


def money(scenario: Scenario, outcome: SimulationResult) -> dict[str, Any] | None:
    """Dollars; None where no price is known."""
    if scenario.price is None:
        return None
    hourly = scenario.price * len(outcome.replicas)
    spent = hourly * outcome.makespan_s / 3600
    output = sum(record.num_output for record in outcome.records)
    every = output + sum(record.num_prompt for record in outcome.records)
    return {
        "per_hour": hourly,
        "per_million_output_tokens": spent / output * 1e6 if output else None,
        "per_million_tokens": spent / every * 1e6 if every else None,
    }


def timeline(outcome: SimulationResult) -> dict[str, Sequence[float | None]]:
    """All replicas together: blocks in use, running and waiting requests, and the hit rate over the last
    WINDOW samples."""
    samples, rates = outcome.samples, []
    for i, sample in enumerate(samples):
        before = samples[i - WINDOW] if i >= WINDOW else None
        hit = sample.hit_tokens - (0 if before is None else before.hit_tokens)
        queried = sample.query_tokens - (0 if before is None else before.query_tokens)
        rates.append(hit / queried if queried else None)
    return {
        "at_s": [sample.time_s for sample in samples],
        "blocks": [sample.blocks for sample in samples],
        "running": [sample.running for sample in samples],
        "waiting": [sample.waiting for sample in samples],
        "hit_rate": rates,
    }
