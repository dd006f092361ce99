"""Split conformal prediction: an upper bound of a further value drawn from the same distribution.

Such values are exchangeable, so a further one is at most the ceil((n + 1) · 0.95)-th smallest of n with a
probability of 95 %, for any distribution. arXiv 2107.07511 §1.
"""

from collections.abc import Sequence
from typing import TypeVar

CONFIDENCE = 95
"""Per cent."""
LEAST_VALUES = 19
"""Fewer bound nothing with this confidence."""
Value = TypeVar("Value", int, float)


def conformal_quantile(values: Sequence[Value]) -> Value:
    """Return the smallest value that a further one does not exceed with a probability of CONFIDENCE."""
    assert len(values) >= LEAST_VALUES, f"{len(values)} values bound nothing"
    return sorted(values)[-(-(len(values) + 1) * CONFIDENCE // 100) - 1]
