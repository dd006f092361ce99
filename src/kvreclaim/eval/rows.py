"""Aggregates the results of examples to rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from kvreclaim.eval.budget import FormatStorage
from kvreclaim.eval.intervals import Array, Interval, bootstrap, ratio_interval
from kvreclaim.eval.plan import EvalPlan, GridColumn
from kvreclaim.eval.report import EvalRow
from kvreclaim.eval.results import TRACE, Result
from kvreclaim.eval.task import Metric, SampledTask, SuiteTask, Task

NUM_BINS = 10
ALONE = "the format alone meets the budget: this is the full cache"
BySeed = Mapping[int, Sequence[Result]]
Cells = dict[tuple[GridColumn, str], BySeed]
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why a cell has no figures, or invalid ones."""

    status: Literal["refused", "error"]
    reason: str


def make_rows(
    plan: EvalPlan,
    tasks: Sequence[Task],
    cells: Cells,
    problems: Mapping[tuple[GridColumn, str], Problem],
    storages: Mapping[str, FormatStorage | None],
) -> list[EvalRow]:
    """Make a row for each setting on each task, in the order of the plan, then of each suite's mean.

    storages: by KV format; None if the blocks are unknown, as on a server
    """
    rows: list[EvalRow] = []
    judged: Cells = {}
    for task in tasks:
        own = {setting: cells[setting, task.name] for setting in plan.settings()}
        by_problem = {setting: _by_problem(task, by_seed) for setting, by_seed in own.items()}
        judged |= {(setting, task.name): by_seed for setting, by_seed in by_problem.items()}
        for setting in plan.settings():
            problem = problems.get((setting, task.name))
            rows.append(_row(plan, setting, task.name, task.metric, own, by_problem, problem, storages))
    for suite, names in _suites(tasks).items():
        every = {s: _joined([cells[s, name] for name in names], list) for s in plan.settings()}
        means = {s: _joined([judged[s, name] for name in names], _mean) for s in plan.settings()}
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
    storages: Mapping[str, FormatStorage | None],
) -> EvalRow:
    """runs, judged: results for costs and for values."""
    by_seed, storage = runs[setting], storages[setting.kv_cache_dtype]
    alone = storage is not None and not setting.is_full and storage.meets(setting.fraction)
    problem = problem or _distrust(plan, setting, by_seed, storage, alone=alone)
    fields = _costs(setting, by_seed, storage)
    if problem is None:
        full = next((judged[s] for s in plan.settings() if _is_baseline(s, plan)), None)
        fields |= _quality(metric, judged[setting])
        fields |= _relative_to_full(metric, judged[setting], full)
        whole = next((runs[s] for s in plan.settings() if _is_baseline(s, plan)), None)
        fields["extra"] |= _trace_of(by_seed, whole)
        if setting.max_loss is not None and whole is not None and metric is Metric.ACCURACY:
            fields["extra"]["broken"] = _broken(setting.max_loss, _flat(by_seed), _flat(whole))
        fields["reason"] = ALONE if alone else _note(setting, by_seed)
    else:
        fields |= {"status": problem.status, "reason": problem.reason}
    return EvalRow(
        policy=setting.policy,
        is_auto=setting.is_auto,
        fraction=setting.fraction,
        tokens=setting.tokens,
        max_loss=setting.max_loss,
        kv_cache_dtype=setting.kv_cache_dtype,
        sparse_prefill=setting.sparse_prefill,
        chunk_reuse=setting.chunk_reuse,
        task=name,
        metric=metric,
        **fields,
    )


def _by_problem(task: Task, by_seed: BySeed) -> BySeed:
    """Merge the verdicts of each problem by sum: its samples are not independent."""
    samples = task.samples if isinstance(task, SampledTask) else 1
    if samples == 1:
        return by_seed
    return {
        seed: [_summed(results[i : i + samples]) for i in range(0, len(results), samples)]
        for seed, results in by_seed.items()
    }


def _summed(results: Sequence[Result]) -> Result:
    sums = {name: sum(getattr(r, name) for r in results) for name in ("points", "out_of")}
    return results[0].model_copy(update=sums)


def _suites(tasks: Sequence[Task]) -> dict[str, list[str]]:
    """Suite -> its tasks, if there are several."""
    found: dict[str, list[str]] = {}
    for task in tasks:
        if isinstance(task, SuiteTask):
            found.setdefault(task.suite, []).append(task.name)
    return {suite: names for suite, names in found.items() if len(names) > 1}


def _joined(cells: Sequence[BySeed], join: Callable[[tuple[Result, ...]], list[Result]]) -> BySeed:
    """Join results of several tasks with equal seed and example."""
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


def _distrust(
    plan: EvalPlan, setting: GridColumn, by_seed: BySeed, storage: FormatStorage | None, *, alone: bool
) -> Problem | None:
    """Reason why figures are invalid: a policy that never ran (though the format alone was not enough), or a
    sequence that was recomputed."""
    results = _flat(by_seed)
    if not results:
        return Problem("error", "nothing was run")
    never = alone or setting.max_loss is not None
    if not never and setting.evicts and not any(r.compactions for r in results):
        longest = max(results, key=lambda r: r.full_blocks)
        assert storage is not None, "a server's policy counts no evictions"
        most = min(longest.num_tokens, longest.full_blocks * storage.block_size)
        return Problem(
            "error",
            f"no compression fired: the longest of {len(results)} sequences has {most} tokens at most, and "
            f"one fires at budget {longest.budget} + interval {plan.interval}; raise the number of tokens, "
            "or lower the budget or the interval",
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
    """Return a note for readers of valid figures."""
    results = _flat(by_seed)
    compressed = sum(r.compactions > 0 for r in results)
    notes = sorted({r.note for r in results if r.note})
    if setting.evicts and compressed < len(results):
        notes.append(
            f"compression fired in {compressed} of {len(results)} examples; the others were too short"
        )
    return "; ".join(notes) or None


def _blocks(setting: GridColumn, results: Sequence[Result], storage: FormatStorage) -> dict[str, Any]:
    mean = {name: float(np.mean([getattr(r, name) for r in results])) for name in _MEANS}
    total = {name: sum(getattr(r, name) for r in results) for name in _SUMS}
    return {
        "budget": round(mean["budget"]),
        "kv_bytes": storage.held_bytes(mean["answer_blocks"]),
        "kv_bytes_peak": storage.held_bytes(mean["peak_blocks"]),
        "kv_bytes_full": mean["full_blocks"] * storage.block_size * storage.reference_bytes,
        "kv_bytes_budget": mean["budget"] * storage.token_bytes
        if setting.fraction is None
        else setting.fraction * mean["num_tokens"] * storage.reference_bytes,
        **total,
        "reclaim_efficiency": total["blocks_freed"] / total["blocks_perfect"]
        if total["blocks_perfect"]
        else None,
        "examples_compressed": sum(r.compactions > 0 for r in results),
    }


def _costs(setting: GridColumn, by_seed: BySeed, storage: FormatStorage | None) -> dict[str, Any]:
    results = _flat(by_seed)
    if not results:
        return {}
    elapsed_s = sum(r.elapsed_s for r in results)
    extras = sorted({name for r in results for name in r.extra})
    return {
        **({} if storage is None else _blocks(setting, results, storage)),
        "num_tokens": float(np.mean([r.num_tokens for r in results])),
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
        "cached_by_turn": _by_turn([r.cached_by_turn for r in results]),
        "agreement_by_turn": _by_turn([r.agreement_by_turn for r in results]),
    }


_MEANS = ("budget", "answer_blocks", "peak_blocks", "full_blocks", "num_tokens")
_SUMS = ("blocks_freed", "blocks_perfect", "tokens_evicted", "compactions", "preemptions")


def _by_turn(sessions: Sequence[Sequence[float]]) -> list[float]:
    """Means over the sessions that have the turn."""
    return [float(np.mean([s for s in turn if s is not None])) for turn in zip_longest(*sessions)]


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


def _relative_to_full(metric: Metric, by_seed: BySeed, full: BySeed | None) -> dict[str, Any]:
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


def _trace_of(by_seed: BySeed, full: BySeed | None) -> dict[str, float]:
    """Generated tokens over the full cache's, on the same examples; empty if no trace was generated."""
    ours, theirs = ([r.extra.get(TRACE) for r in _flat(each or {})] for each in (by_seed, full))
    if len(ours) != len(theirs) or None in (*ours, *theirs) or not theirs:
        return {}
    return {"trace_of": sum(filter(None, ours)) / max(1.0, sum(filter(None, theirs)))}


def _broken(max_loss: float, ours: Sequence[Result], full: Sequence[Result]) -> float:
    """Share of examples that lost more than max_loss."""
    pairs = zip(ours, full, strict=True)
    return float(np.mean([f.points / f.out_of - r.points / r.out_of > max_loss for r, f in pairs]))


def _columns(results: Sequence[Result]) -> tuple[Array, Array]:
    return np.array([r.points for r in results]), np.array([r.out_of for r in results])


def _values(metric: Metric, points: Array, out_of: Array, rows: Rows) -> Array:
    """[resamples] values of the examples in each row [resamples, n]."""
    return _value(metric, points[rows].sum(-1), out_of[rows].sum(-1))


def _value(metric: Metric, points: Any, out_of: Any) -> Any:
    share = points / out_of
    value = np.exp(share) if metric is Metric.PERPLEXITY else share
    return float(value) if np.ndim(value) == 0 else value
