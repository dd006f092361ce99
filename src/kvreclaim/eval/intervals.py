"""95 % intervals of a row's figures, over its examples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

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

    Wilson if each example is one verdict, or if all are correct or all are wrong, where the bootstrap would
    have width 0 (an example then counts as one trial); else the bootstrap. None for a single example that is
    partly correct.
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
