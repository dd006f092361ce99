"""Log-probabilities that cross processes: the same after any way, and none made before somebody looks."""

from __future__ import annotations

import pickle

import hypothesis.strategies as st
from hypothesis import given

from kvreclaim.engine.core.outputs import Logprob
from kvreclaim.engine.serving.reports import Reports
from kvreclaim.engine.serving.stream import OutputDelta

NUMBERS = st.builds(Logprob, st.floats(max_value=0.0), st.integers(1, 300_000))
REPORTS = st.lists(st.none() | st.dictionaries(st.integers(0, 300_000), NUMBERS, max_size=4), max_size=5)


@given(REPORTS, REPORTS)
def test_reports_are_what_was_given(first, second):
    """After pickling and put together, in the order of each report; as often as one asks."""
    sent, later = pickle.loads(pickle.dumps((Reports(first), Reports(second))))
    sent.extend(later)
    assert len(sent) == len(first) + len(second)
    for _ in range(2):
        assert list(sent) == first + second
        assert [r and list(r) for r in sent] == [r and list(r) for r in first + second]


def test_crossing_makes_no_objects():
    sent = pickle.dumps(OutputDelta(0, logprobs=Reports([{7: Logprob(-1.0, 1)}])))
    assert b"Logprob" not in sent


def test_deltas_with_and_without_reports():
    one, other = [{1: Logprob(-0.5, 1)}], [{2: Logprob(-0.25, 3)}]
    for before, after in ((one, None), (None, one), (one, other), (None, None)):
        delta = OutputDelta(0, logprobs=before and Reports(before))
        delta.extend(OutputDelta(0, logprobs=after and Reports(after)))
        assert list(delta.logprobs or ()) == (before or []) + (after or [])
