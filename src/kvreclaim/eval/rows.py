"""From the results of examples to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvreclaim.eval.budget import FormatStorage
from kvreclaim.eval.plan import EvalPlan, GridColumn
from kvreclaim.eval.report import EvalRow
from kvreclaim.eval.results import Result
from kvreclaim.eval.task import Metric, SuiteTask, Task

NUM_BINS = 10
ALONE = "the format alone meets the budget: this is the full cache"
BySeed = Mapping[int, Sequence[Result]]
Cells = dict[tuple[GridColumn, str], BySeed]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a cell has no figures, or none to be trusted."""

    status: Literal["refused", "error"]
    reason: str


def make_rows(
    plan: EvalPlan,
    tasks: Sequence[Task],
    cells: Cells,
    problems: Mapping[tuple[GridColumn, str], Problem],
    storages: Mapping[str, FormatStorage],
) -> list[EvalRow]:
    """A row for each setting on each task, in the order of the plan, then of each suite's mean.

    storages: by KV format
    """
    rows = []
    for task in tasks:
        own = {setting: cells[setting, task.name] for setting in plan.settings()}
        for setting in plan.settings():
            problem = problems.get((setting, task.name))
            rows.append(_row(plan, setting, task.name, task.metric, own, own, problem, storages))
    for suite, names in _suites(tasks).items():
        every = {s: _joined([cells[s, name] for name in names], list) for s in plan.settings()}
        means = {s: _joined([cells[s, name] for name in names], _mean) for s in plan.settings()}
        for setting in plan.settings():
            problem = next((problems[setting, name] for name in names if (setting, name) in problems), None)
            title = f"{suite}, mean of {len(names)}"
            rows.append(_row(plan, setting, title, Metric.ACCURACY, every, means, problem, storages))
    return rows


def _row(
    plan: EvalPlan,
    setting: GridColumn,
    name: str,
    metric: Metric,
    runs: Mapping[GridColumn, BySeed],
    judged: Mapping[GridColumn, BySeed],
    problem: Problem | None,
    storages: Mapping[str, FormatStorage],
) -> EvalRow:
    """runs, judged: results that costs and values come from."""
    by_seed, storage = runs[setting], storages[setting.kv_cache_dtype]
    alone = not setting.is_full and storage.meets(setting.fraction)
    problem = problem or _distrust(plan, setting, by_seed, alone=alone)
    fields = _costs(setting, by_seed, storage)
    if problem is None:
        full = next((judged[s] for s in plan.settings() if _is_baseline(s, plan)), None)
        fields |= _quality(metric, judged[setting])
        fields |= _beside_full(metric, judged[setting], full)
        fields["reason"] = ALONE if alone else _note(setting, by_seed)
    else:
        fields |= {"status": problem.status, "reason": problem.reason}
    return EvalRow(
        policy=setting.policy,
        fraction=setting.fraction,
        kv_cache_dtype=setting.kv_cache_dtype,
        sparse_prefill=setting.sparse_prefill,
        chunk_reuse=setting.chunk_reuse,
        task=name,
        metric=metric,
        **fields,
    )


def _suites(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """Suite -> its tasks, where there are several."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        if isinstance(task, SuiteTask):
            found.setdefault(task.suite, []).append(task.name)
    return {suite: names for suite, names in found.items() if len(names) > 1}


def _joined(cells: Sequence[BySeed], join: Callable[[tuple[Result, ...]], list[Result]]) -> BySeed:
    """Results of several tasks, joined where seed and example are the same."""
    return {
        seed: [result for same in zip(*(cell[seed] for cell in cells), strict=False) for result in join(same)]
        for seed in cells[0]
    }


def _mean(results: tuple[Result, ...]) -> list[Result]:
    share = float(np.mean([r.points / r.out_of for r in results]))
    return [results[0].model_copy(update={"points": share, "out_of": 1.0})]


def _is_baseline(setting: GridColumn, plan: EvalPlan) -> bool:
    first = plan.kv_cache_dtypes[0], plan.sparse_prefill[0], plan.chunk_reuse[0]
    own = setting.kv_cache_dtype, setting.sparse_prefill, setting.chunk_reuse
    return setting.is_full and own == first


def _flat(by_seed: BySeed) -> list[Result]:
    return [result for results in by_seed.values() for result in results]


def _distrust(plan: EvalPlan, setting: GridColumn, by_seed: BySeed, *, alone: bool) -> Problem | None:
    """Why figures are worthless: a policy that never ran (though the format alone was not enough), a
    sequence computed twice."""
    results = _flat(by_seed)
    if not results:
        return Problem("error", "nothing was run")
    if not alone and setting.evicts and not any(r.compactions for r in results):
        longest = max(results, key=lambda r: r.num_tokens)
        return Problem(
            "error",
            f"no compression fired: the longest of {len(results)} sequences has {longest.num_tokens} tokens, "
            f"and one fires at budget {longest.budget} + interval {plan.interval}; raise the number of "
            "tokens, or lower the budget or the interval",
        )
    if preempted := sum(r.preemptions for r in results):
        return Problem("error", f"{preempted} preemptions; give the pool more blocks or lower the batch size")
    if gone := sum(r.gone_tokens for r in results):
        return Problem(
            "error",
            f"{gone} tokens of chunks had left the pool before they were reused; give it more blocks or "
            "lower the batch size",
        )
    return None


def _note(setting: GridColumn, by_seed: BySeed) -> str | None:
    """A note for readers of good figures."""
    results = _flat(by_seed)
    compressed = sum(r.compactions > 0 for r in results)
    notes = sorted({r.note for r in results if r.note})
    if setting.evicts and compressed < len(results):
        notes.append(
            f"compression fired in {compressed} of {len(results)} examples; the others were too short"
        )
    return "; ".join(notes) or None


def _costs(setting: GridColumn, by_seed: BySeed, storage: FormatStorage) -> dict[str, Any]:
    results = _flat(by_seed)
    if not results:
        return {}
    mean = {name: float(np.mean([getattr(r, name) for r in results])) for name in _MEANS}
    total = {name: sum(getattr(r, name) for r in results) for name in _SUMS}
    elapsed_s = sum(r.elapsed_s for r in results)
    extras = sorted({name for r in results for name in r.extra})
    return {
        "budget": round(mean["budget"]),
        "num_tokens": mean["num_tokens"],
        "kv_bytes": storage.held_bytes(mean["answer_blocks"]),
        "kv_bytes_peak": storage.held_bytes(mean["peak_blocks"]),
        "kv_bytes_full": mean["full_blocks"] * storage.block_size * storage.reference_bytes,
        "kv_bytes_budget": setting.fraction * mean["num_tokens"] * storage.reference_bytes,
        **total,
        "reclaim_efficiency": total["blocks_freed"] / total["blocks_perfect"]
        if total["blocks_perfect"]
        else None,
        "examples_compressed": sum(r.compactions > 0 for r in results),
        "num_examples": len(results),
        "num_judged": sum(r.out_of for r in results),
        "tokens_per_s": sum(r.timed_tokens for r in results) / elapsed_s,
        "speed_of": "generation" if results[0].generated else "scoring",
        "elapsed_s": elapsed_s,
        "extra": {
            name: float(np.mean([r.extra[name] for r in results if name in r.extra])) for name in extras
        },
        "lost_at": _histogram([place for r in results for place in r.lost]),
        "asked_at": _histogram([place for r in results for place in (*r.found, *r.lost)]),
    }


_MEANS = ("budget", "answer_blocks", "peak_blocks", "full_blocks", "num_tokens")
_SUMS = ("blocks_freed", "blocks_perfect", "tokens_evicted", "compactions", "preemptions")


def _histogram(places: list[float]) -> list[int]:
    return [int(n) for n in np.histogram(places, bins=NUM_BINS, range=(0.0, 1.0))[0]]


def _quality(metric: Metric, by_seed: BySeed) -> dict[str, Any]:
    results = _flat(by_seed)
    points, out_of = _columns(results)
    value = _value(metric, points.sum(), out_of.sum())
    interval: Interval | None
    if metric is Metric.PERPLEXITY:
        interval = bootstrap(lambda rows: _values(metric, points, out_of, rows), len(results))
    else:
        interval = ratio_interval(points, out_of)
    return {
        "value": value,
        "accuracy": value if metric is Metric.ACCURACY else None,
        "ci95": None if interval is None else (interval.low, interval.high),
        "ci_method": None if interval is None else interval.method,
        "value_by_seed": {
            str(seed): _value(metric, *(column.sum() for column in _columns(some)))
            for seed, some in by_seed.items()
            if some
        },
    }


def _beside_full(metric: Metric, by_seed: BySeed, full: BySeed | None) -> dict[str, Any]:
    """The value over the full cache's, both from the same examples in every resample."""
    if full is None or [len(full.get(s, ())) for s in by_seed] != [len(r) for r in by_seed.values()]:
        return {}
    ours, theirs = _columns(_flat(by_seed)), _columns(_flat(full))
    whole = np.arange(len(ours[0]))[None]
    base = float(_values(metric, *theirs, whole)[0])
    if not base:
        return {}

    def ratio(rows: Rows) -> Array:
        with np.errstate(divide="ignore", invalid="ignore"):
            return _values(metric, *ours, rows) / _values(metric, *theirs, rows)

    interval = bootstrap(ratio, len(ours[0]))
    return {
        "of_full": float(ratio(whole)[0]),
        "of_full_ci95": None if interval is None else (interval.low, interval.high),
    }


def _columns(results: Sequence[Result]) -> tuple[Array, Array]:
    return np.array([r.points for r in results]), np.array([r.out_of for r in results])


def _values(metric: Metric, points: Array, out_of: Array, rows: Rows) -> Array:
    """[resamples] values of the examples in each row [resamples, n]."""
    return _value(metric, points[rows].sum(-1), out_of[rows].sum(-1))


def _value(metric: Metric, points: Any, out_of: Any) -> Any:
    share = points / out_of
    value = np.exp(share) if metric is Metric.PERPLEXITY else share
    return float(value) if np.ndim(value) == 0 else value


NUM_RESAMPLES = 2000
SEED = 20_240_229
Z95 = 1.959963984540054
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """low and high bound of a 95 % interval, and how it was found: "wilson" or "bootstrap"."""

    low: float
    high: float
    method: str


def wilson(successes: float, trials: int) -> Interval:
    """Wilson interval of a share of independent trials. Source: Wilson, JASA 22 (1927) 209-212."""
    share, z2 = successes / trials, Z95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = Z95 * sqrt(share * (1 - share) / trials + z2 / (4 * trials**2)) / (1 + z2 / trials)
    low = 0.0 if share == 0 else max(0.0, centre - half)
    high = 1.0 if share == 1 else min(1.0, centre + half)
    return Interval(low, high, "wilson")


def ratio_interval(points: Array, out_of: Array) -> Interval | None:
    """Interval of sum(points) / sum(out_of), points in [0, out_of], over examples [n].

    Wilson where each example is one verdict, and where all of them are right or all of them are wrong,
    which the bootstrap would call certain (an example then counts as one trial); else the bootstrap.
    None for a single example that is partly right.
    """
    binary = bool(np.all(out_of == 1) and np.all((points == 0) | (points == 1)))
    share = float(points.sum() / out_of.sum())
    if binary or share in (0.0, 1.0):
        return wilson(share * len(points), len(points))
    return bootstrap(lambda rows: points[rows].sum(-1) / out_of[rows].sum(-1), len(points))


def bootstrap(statistic: Callable[[NDArray[np.int64]], Array], num_examples: int) -> Interval | None:
    """Percentile bootstrap by example, fixed seed, NUM_RESAMPLES resamples.

    statistic: indices [resamples, num_examples] -> values [resamples]; those not finite are left out
    Returns: None for fewer than two examples, or where no value is finite.
    """
    if num_examples < 2:
        return None
    rows = np.random.default_rng(SEED).integers(0, num_examples, (NUM_RESAMPLES, num_examples))
    values = statistic(rows)
    values = values[np.isfinite(values)]
    if not len(values):
        return None
    low, high = np.percentile(values, (2.5, 97.5))
    return Interval(float(low), float(high), "bootstrap")
