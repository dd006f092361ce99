"""The terms of a step's time, from steps that were measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvreclaim.checks import require
from kvreclaim.plan.cost import StepLoad, Stepped

Array = NDArray[np.float64]

TERMS = ("base", "token", "beyond", "kv", "pair", "seq")
FREE = "seq"
"""May be negative: it corrects the other terms for small batches."""
KNEES = (16, 32, 64, 128, 256, 512, 1024)
KNOTS = (
    1.0,
    2.0,
    4.0,
    8.0,
    9.0,
    16.0,
    17.0,
    32.0,
    33.0,
    64.0,
    65.0,
    128.0,
    129.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
)
"""Numbers of tokens at which kernels tend to change: after powers of two."""
WEIGHT = 4.0
"""Weight of "nothing more" at a knot, in steps that were seen there."""
TURNS = 3
MIN_STEPS = 50
REWEIGHTED = 4
"""Number of fits. The first one divides by the measured times, and their noise makes it too fast; each later
one divides by the times that the previous fit expects."""
EVERY = 5
"""One step in this many is held out to measure the error."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A step's time and how well it fits.

    mape: mean of |predicted / measured - 1| over steps that were held out from a first fit
    sum_error: predicted over measured time of all of these, less one
    num_steps: of both
    """

    cost: Stepped
    mape: float
    sum_error: float
    num_steps: int


def fit_steps(loads: Sequence[StepLoad], seconds: Sequence[float], **facts: Any) -> Fitted:
    """Fit terms by least squares of relative errors, none but `seq` below zero, at the best of KNEES. The
    rest is fitted at KNOTS, as far as steps of that many tokens were measured.

    loads, seconds: at least MIN_STEPS steps, seconds > 0
    facts:          facts of the result

    Raises: InvalidArgumentError for fewer steps.
    """
    require(
        len(loads) == len(seconds) >= MIN_STEPS,
        f"a fit needs {MIN_STEPS} measured steps at least, got {len(loads)}; measure for longer.",
        "loads",
    )
    times = np.asarray(seconds, dtype=np.float64)
    held = np.arange(len(loads)) % EVERY == EVERY - 1
    seen = [load for load, out in zip(loads, held, strict=True) if not out]
    others = [load for load, out in zip(loads, held, strict=True) if out]
    guess = _fitted(seen, times[~held], {})
    predicted = np.array([guess.step_s(load) for load in others])
    mape = float(np.mean(np.abs(predicted / times[held] - 1)))
    sum_error = float(predicted.sum() / times[held].sum() - 1)
    facts = {**facts, "steps": len(loads), "mape": mape, "sum_error": sum_error}
    return Fitted(_fitted(loads, times, facts), mape, sum_error, len(loads))


def _fitted(loads: Sequence[StepLoad], times: Array, facts: dict[str, Any]) -> Stepped:
    """Fit in turns the terms to the rest of the knots, and the knots to the rest of the terms."""
    tables = {knee: _table(loads, knee) for knee in KNEES}
    hats = _hats(np.array([load.num_tokens for load in loads]))
    more = np.zeros(len(KNOTS))
    for _ in range(TURNS):
        left = np.maximum(times - hats @ more, times / 10)
        knee = min(KNEES, key=lambda each: _solve(tables[each], left)[1])
        terms = _solve(tables[knee], left)[0]
        plain = tables[knee] @ terms
        expected = np.maximum(plain + hats @ more, times.min() / 2)
        at_knots = (hats.T @ expected + expected.mean()) / (hats.sum(axis=0) + 1)
        rows = np.concatenate([hats / expected[:, None], np.diag(np.sqrt(WEIGHT) / at_knots)])
        target = np.concatenate([(times - plain) / expected, np.zeros(len(KNOTS))])
        more = np.linalg.lstsq(rows, target, rcond=None)[0]
    named = dict(zip(TERMS, map(float, terms), strict=True))
    return Stepped(**named, knee=knee, knots=KNOTS, more=tuple(map(float, more)), facts=facts)


def _hats(tokens: Array) -> Array:
    """[steps, knots]: the share that each knot has of a step's number of tokens."""
    eye = np.eye(len(KNOTS))
    return np.stack([np.interp(tokens, KNOTS, row) for row in eye], axis=1)


def _table(loads: Sequence[StepLoad], knee: int) -> Array:
    """[steps, terms]"""
    rows = [
        (
            1,
            each.num_tokens,
            max(0, each.num_tokens - knee),
            each.kv_tokens,
            each.prefill_pairs,
            each.num_seqs,
        )
        for each in loads
    ]
    return np.asarray(rows, dtype=np.float64)


def _solve(table: Array, times: Array) -> tuple[Array, float]:
    """Coefficients, and the sum of squared relative errors."""
    expected = times
    for _ in range(REWEIGHTED):
        found = _bounded(table / expected[:, None], times / expected)
        expected = np.maximum(table @ found, times.min() / 2)
    return found, float(np.sum((table @ found / expected - times / expected) ** 2))


def _bounded(table: Array, target: Array) -> Array:
    """Least squares. Terms that come out negative are left out, the worst first."""
    scale = np.maximum(np.abs(table).max(axis=0), 1e-30)
    kept = list(range(len(TERMS)))
    while True:
        found = np.linalg.lstsq(table[:, kept] / scale[kept], target, rcond=None)[0]
        below = [i for i, value in enumerate(found) if value < 0 and TERMS[kept[i]] != FREE]
        if not below:
            break
        del kept[min(below, key=lambda i: found[i])]
    whole = np.zeros(len(TERMS))
    whole[kept] = found / scale[kept]
    return whole
