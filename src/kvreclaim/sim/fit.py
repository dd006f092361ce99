"""A cost model from a log of requests: that with which the simulator gives the times of the log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import exp, log
from typing import Any

from kvreclaim.checks import require
from kvreclaim.plan.cost import Linear
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.request import Asked, Record
from kvreclaim.sim.settings import Settings

FITTED = ("base", "token", "kv")
"""Reading the weights, a token more, a key more; the others stay as they were."""
WIDTH = 0.15
"""Of the first simplex, in logarithms."""


@dataclass(frozen=True, slots=True)
class Logged:
    """A request of a log, in the order of arrival: times since the first one came; None: not yet."""

    asked: Asked
    first_token_s: float | None
    end_s: float | None

    def known_at(self, now: float) -> Logged:
        """What a log that ends then says."""
        first, end = self.first_token_s, self.end_s
        return replace(
            self,
            first_token_s=first if first is not None and first <= now else None,
            end_s=end if end is not None and end <= now else None,
        )


def fit(log_: Sequence[Logged], settings: Settings, start: Linear, *, until_s: float) -> Linear:
    """From what the log says up to a time. start: a first guess, such as a card's roofline; a number that is
    0 stays so. Deterministic; some 100 simulations.

    Raises: InvalidArgumentError if nothing has happened by then.
    """
    known = [each.known_at(until_s) for each in log_]
    num_times = sum(each.first_token_s is not None for each in known)
    require(num_times > 0, f"no request of the log has a token by {until_s:g} s; take more of it.", "until")
    names = [name for name in FITTED if getattr(start, name) > 0]
    asked = [each.asked for each in known]

    def cost(point: Sequence[float]) -> Linear:
        given: dict[str, Any] = {name: exp(x) for name, x in zip(names, point, strict=True)}
        return replace(start, **given)

    def error(point: Sequence[float]) -> float:
        outcome = Cluster(settings, cost(point)).run(asked, until_s=until_s)
        found = {record.number: record for record in outcome.records}
        pairs = [_off(each, found.get(i), until_s) for i, each in enumerate(known)]
        return sum(pairs) / num_times

    best, left = descend(error, [log(getattr(start, name)) for name in names])
    facts = {
        "kind": "fitted to a log",
        "error": f"first and last tokens up to {until_s:.0f} s are off by {left * until_s:.2f} s in the mean",
        "times": num_times,
    }
    return replace(cost(best), facts=facts)


def _off(logged: Logged, record: Record | None, until_s: float) -> float:
    """Of a request's times, how far off they are, as shares of the log; one that has come on one side only
    counts as if it came at its end on the other."""
    off = 0.0
    for name in ("first_token_s", "end_s"):
        real, found = getattr(logged, name), getattr(record, name) if record is not None else None
        if real is not None or found is not None:
            real, found = (until_s if time is None else time for time in (real, found))
            off += abs(real - found) / until_s
    return off


def descend(
    error: Callable[[Sequence[float]], float], start: Sequence[float], *, most: int = 120
) -> tuple[list[float], float]:
    """Nelder and Mead's simplex. Returns: the best point of at most so many, and its error."""
    axes = range(-1, len(start))
    points = [[x + WIDTH * (i == axis) for i, x in enumerate(start)] for axis in axes]
    simplex = [(error(point), point) for point in points]
    tried = len(simplex)
    while tried < most:
        simplex.sort(key=lambda each: each[0])
        if simplex[-1][0] - simplex[0][0] < 1e-6:
            break
        columns = zip(*(point for _, point in simplex[:-1]), strict=True)
        middle = [sum(column) / len(start) for column in columns]
        worst = simplex[-1]

        def along(step: float, middle: list[float] = middle, worst: Any = worst) -> tuple[float, list[float]]:
            point = [m + step * (m - w) for m, w in zip(middle, worst[1], strict=True)]
            return error(point), point

        found = along(1.0)
        tried += 1
        if found[0] < simplex[0][0]:
            found, tried = min(found, along(2.0), key=lambda each: each[0]), tried + 1
        elif found[0] >= simplex[-2][0]:
            found, tried = min(found, along(-0.5), key=lambda each: each[0]), tried + 1
        if found[0] < worst[0]:
            simplex[-1] = found
            continue
        best = simplex[0][1]
        shrunk = [[(x + b) / 2 for x, b in zip(point, best, strict=True)] for _, point in simplex[1:]]
        simplex[1:] = [(error(point), point) for point in shrunk]
        tried += len(shrunk)
    value, point = min(simplex, key=lambda each: each[0])
    return point, value
