"""Spans as sets of tokens."""

from __future__ import annotations

import itertools
import random

import pytest

from kvreclaim.schedule.budget.drops import beyond, joined


def tokens(spans):
    return {token for start, end in spans for token in range(start, end)}


@pytest.mark.parametrize("most", [1, 3, 12])
def test_spans_are_sets(most):
    """Joined spans ascend and lie apart, and so does what is left of them outside of others."""
    rng = random.Random(most)

    def some():
        starts = (rng.randrange(40) for _ in range(rng.randrange(most + 1)))
        return [(start, start + rng.randrange(9)) for start in starts]

    for _ in range(400):
        one, other = some(), some()
        spans, others = joined(one), joined(other)
        assert tokens(spans) == tokens(one)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
        left = beyond(spans, others)
        assert tokens(left) == tokens(spans) - tokens(others)
        assert joined(left) == left
