"""Intervals against published numbers, and what makes them honest: examples are resampled, not verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from kvreclaim.eval.intervals import bootstrap, ratio_interval, wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilson_gives_the_published_bounds(successes, trials, low, high):
    # 81 of 263: Newcombe, Statistics in Medicine 17 (1998), table I, method 3
    found = wilson(successes, trials)
    assert found.low == pytest.approx(low, abs=5e-5)
    assert found.high == pytest.approx(high, abs=5e-5)
    assert found.method == "wilson"


def test_one_verdict_an_example_is_a_share_of_trials():
    points = np.array([1.0, 0.0, 1.0, 1.0])
    assert ratio_interval(points, np.ones(4)) == wilson(3, 4)


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_all_right_or_all_wrong_is_not_certain(right):
    out_of = np.array([20.0, 30.0, 25.0])
    assert ratio_interval(right * out_of, out_of) == wilson(3 * right, 3)


def test_the_bootstrap_agrees_with_the_normal_approximation():
    rng = np.random.default_rng(1)
    out_of = np.full(400, 25.0)
    points = rng.binomial(25, rng.beta(4, 2, size=400)).astype(float)
    found = ratio_interval(points, out_of)
    shares = points / 25
    half = 1.96 * shares.std(ddof=1) / 20
    assert found is not None
    assert found.method == "bootstrap"
    assert found.low == pytest.approx(shares.mean() - half, abs=0.1 * half)
    assert found.high == pytest.approx(shares.mean() + half, abs=0.1 * half)


def test_more_verdicts_of_the_same_examples_narrow_nothing():
    out_of = np.array([5.0, 7.0, 9.0, 6.0, 8.0, 5.0])
    points = np.array([5.0, 3.0, 9.0, 1.0, 4.0, 5.0])
    assert ratio_interval(points, out_of) == ratio_interval(10 * points, 10 * out_of)


def test_one_example_has_no_spread():
    assert bootstrap(lambda rows: rows.mean(-1), 1) is None
    assert ratio_interval(np.array([3.0]), np.array([7.0])) is None


def test_resamples_without_a_value_are_left_out():
    found = bootstrap(lambda rows: np.where(rows[:, 0] == 0, np.nan, 2.0), 2)
    assert (found.low, found.high) == (2.0, 2.0)
    assert bootstrap(lambda rows: np.full(len(rows), np.inf), 2) is None
