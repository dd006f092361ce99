"""Fit the terms of a step's time to a log of requests: simulated first and last tokens come at the logged
times. Read such logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvreclaim.checks import parse_json, require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.cost import Linear
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.request import RequestRecord, SimRequest
from kvreclaim.sim.settings import Settings

LINES = ("input_toks", "output_toks", "queued_ts", "first_token_ts", "last_token_ts")
LISTS = ("input_lens", "output_lens", "start_times", "ttfts", "itls")
FORMATS = (
    f"a file of vllm bench serve --save-result --save-detailed ({', '.join(LISTS)}), or JSON lines with "
    f"{', '.join(LINES)}"
)


def read_log(path: Path) -> list[RequestRecord]:
    """Read a log, by arrival. Raises: InvalidArgumentError for a file of no known format."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"{path} cannot be read ({error}); pass {FORMATS}.", field="log") from None
    try:
        whole = parse_json(text)
    except ValueError:
        whole = None
    try:
        if isinstance(whole, dict) and "start_times" in whole:
            rows = _of_lists(whole)
        else:
            rows = [_of_line(parse_json(line)) for line in text.splitlines() if line.strip()]
    except (ValueError, KeyError, TypeError, IndexError, OverflowError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise InvalidArgumentError(
            f"{path} is no log of requests ({what}); pass {FORMATS}.", field="log"
        ) from None
    return _checked(rows, path)


def _of_line(row: Mapping[str, Any]) -> RequestRecord:
    prompt, output, queued, first, last = (row[name] for name in LINES)
    return _record(float(queued), int(prompt), int(output), float(first), float(last))


def _of_lists(whole: Mapping[str, Any]) -> list[RequestRecord]:
    columns = zip(*(whole[name] for name in LISTS), strict=True)
    return [
        _record(float(start), int(prompt), int(output), start + ttft, start + ttft + sum(gaps))
        for prompt, output, start, ttft, gaps in columns
        if output
    ]


def _record(arrival_s: float, prompt: int, output: int, first_s: float, end_s: float) -> RequestRecord:
    return RequestRecord(0, 0, arrival_s, prompt, output, first_token_s=first_s, end_s=end_s)


def _checked(rows: list[RequestRecord], path: Path) -> list[RequestRecord]:
    """Sort the requests and shift their times, so that the first one arrives at 0."""
    found = []
    start = min((row.arrival_s for row in rows), default=None)
    if start is None:
        raise InvalidArgumentError(f"{path} has no requests; pass {FORMATS}.", field="log")
    for number, row in enumerate(sorted(rows, key=lambda row: row.arrival_s)):
        first_s, end_s = row.first_token_s, row.end_s
        assert first_s is not None
        assert end_s is not None
        times = (row.arrival_s, first_s, end_s)
        require(
            all(map(isfinite, times)) and row.arrival_s <= first_s <= end_s,
            f"{path}: a request that came at {row.arrival_s} got its first token at {first_s} and its last "
            f"at {end_s}; times must be seconds of one clock, in this order.",
            "log",
        )
        require(
            row.num_prompt >= 1 and row.num_output >= 1,
            f"{path}: a request has {row.num_prompt} tokens in and {row.num_output} out; leave out those "
            "that were not answered.",
            "log",
        )
        arrival_s, first_s, end_s = (each - start for each in times)
        found.append(replace(row, number=number, arrival_s=arrival_s, first_token_s=first_s, end_s=end_s))
    return found


Array = NDArray[np.float64]

FITTED = {
    "weights": ("base", "dense", "experts"),
    "tokens": ("beyond", "flop"),
    "keys": ("kv",),
    "pairs": ("pair",),
}
"""Terms of a roofline: reading weights, computing tokens, reading keys, attention of prompts; one factor
each."""
PRIOR = 0.3
"""Weight of a factor's logarithm, less their mean, relative to errors of times: factors that the log does not
determine change as the others do."""
STEP = 0.05
LONGEST = 1.0
"""Step of a logarithm: slopes far away are others."""
MAX_ROUNDS = 12
MIN_REQUESTS = 8
LATEST = 1.5
"""Times what is looked at: so long is simulated."""
SHORTEST_S = 0.05
"""Times below are as exact as a step is long."""


@dataclass(frozen=True, slots=True)
class FittedLog:
    """error: mean of |simulated / logged - 1| over the times that were fitted; factors: on the start's terms.

    num_times: first and last tokens that were fitted
    """

    cost: Linear
    error: float
    factors: dict[str, float]
    num_times: int


class _Problem:
    """Residuals of a vector of the terms' logarithms, over the start's."""

    def __init__(
        self, log: Sequence[RequestRecord], settings: Settings, start: Linear, until_s: float
    ) -> None:
        self.requests = [each.request for each in log]
        self.settings, self.start, self.until_s = settings, start, LATEST * until_s
        arrival, first, last = (
            np.array([getattr(each, name) for each in log])
            for name in ("arrival_s", "first_token_s", "end_s")
        )
        self.first, self.last = first, last
        self.begun, self.ended = first < until_s, last < until_s
        self.scales = np.concatenate([(first - arrival)[self.begun], (last - arrival)[self.ended]])
        self.scales = np.maximum(self.scales, SHORTEST_S)

    def cost(self, logs: Array) -> Linear:
        terms = {
            name: getattr(self.start, name) * float(factor)
            for names, factor in zip(FITTED.values(), np.exp(logs), strict=True)
            for name in names
            if hasattr(self.start, name)
        }
        if terms["beyond"] > 0:
            terms["knee"] = terms["base"] / terms["beyond"]
        return replace(self.start, **terms)

    def errors(self, logs: Array) -> Array:
        """Relative, of all times."""
        records = simulate_log(self.requests, self.settings, self.cost(logs), until_s=self.until_s)
        first, last = np.full(len(self.requests), self.until_s), np.full(len(self.requests), self.until_s)
        for each in records:  # what has not come by then comes then: late enough
            first[each.number] = self.until_s if each.first_token_s is None else each.first_token_s
            last[each.number] = self.until_s if each.end_s is None else each.end_s
        found = np.concatenate([(first - self.first)[self.begun], (last - self.last)[self.ended]])
        return np.asarray(found / self.scales, dtype=np.float64)

    def residuals(self, logs: Array) -> Array:
        return np.concatenate([self.errors(logs), PRIOR * (logs - logs.mean())])


def simulate_log(
    requests: Sequence[SimRequest], settings: Settings, cost: Linear, until_s: float = inf
) -> list[RequestRecord]:
    """All requests on one engine, or what came of them by until_s. Raises: InvalidArgumentError if one of
    them can never run there."""
    out = Cluster(settings, cost).run(requests, until_s=until_s)
    require(
        not out.refused,
        f"{len(out.refused)} requests of the log fit into no pool of {settings.num_blocks} blocks of "
        f"{settings.block_size}; pass the log's own number of blocks.",
        "num_blocks",
    )
    return out.records


def fit_log(
    log: Sequence[RequestRecord], settings: Settings, start: Linear, share: float = 1.0, **facts: Any
) -> FittedLog:
    """Gauss-Newton over the logarithms of FITTED, from a roofline: first all together, then each.

    settings: of the engine that was logged
    start:    a roofline, with experts or without
    share:    of the log's time, from its beginning, that is looked at
    facts:    that the result is to carry

    Raises: InvalidArgumentError for too few times, and for requests that no such engine can run.
    """
    until_s = share * max(each.end_s for each in log if each.end_s is not None)
    problem = _Problem(log, settings, start, until_s)
    num_times = len(problem.scales)
    require(
        num_times >= MIN_REQUESTS,
        f"the first {share:.0%} of the log have {num_times} first or last tokens, a fit needs "
        f"{MIN_REQUESTS}; take more of it.",
        "share",
    )
    at = np.zeros(len(FITTED))
    residuals = problem.residuals(at)
    together, apart = np.ones((1, len(FITTED))), np.eye(len(FITTED))
    for axes in (together, apart):
        for _ in range(MAX_ROUNDS):
            moved = _improved(problem, at, residuals, axes)
            if moved is None:
                break
            at, residuals = moved
    cost, error = problem.cost(at), float(np.abs(residuals[:num_times]).mean())
    facts = {**facts, "times": num_times, "error": error}
    factors = dict(zip(FITTED, map(float, np.exp(at)), strict=True))
    return FittedLog(replace(cost, facts=facts), error, factors, num_times)


def _improved(problem: _Problem, at: Array, residuals: Array, axes: Array) -> tuple[Array, Array] | None:
    """A better place, as far along the Gauss-Newton step as it gets better; None: nowhere."""
    slopes = [(problem.residuals(at + STEP * axis) - residuals) / STEP for axis in axes]
    step = axes.T @ np.linalg.lstsq(np.stack(slopes, axis=1), -residuals, rcond=None)[0]
    step *= min(1.0, LONGEST / np.abs(step).max())
    for length in (1.0, 0.5, 0.25, 0.1):
        there = problem.residuals(at + length * step)
        if there @ there < residuals @ residuals:
            return at + length * step, there
    return None
