"""Log-probabilities that cross processes: the same after any way, and none made before somebody looks."""

from __future__ import annotations

import pickle
from dataclasses import MISSING, Field, fields

import hypothesis.strategies as st
from hypothesis import given

from kvreclaim.engine.core.outputs import Logprob, RequestMetrics
from kvreclaim.engine.serving.reports import Reports
from kvreclaim.engine.serving.stream import OutputDelta, Update

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


def test_news_cross_whole():
    """Every field of an update: pickled by hand, so none may be forgotten."""
    metrics = RequestMetrics(num_prompt_tokens=3)
    delta = OutputDelta(2, "a word", [5, 6], Reports([{1: Logprob(-0.5, 1)}]), "stop", "\n")
    update = Update({2: delta}, metrics, finished=True, error="none", prompt_logprobs=Reports([None]))
    sent = pickle.loads(pickle.dumps(update))
    for made, crossed in ((update, sent), (delta, sent.deltas[2])):
        for field in fields(made):
            assert getattr(made, field.name) != default_of(field), "or the test could not tell"
            same = getattr(crossed, field.name), getattr(made, field.name)
            if isinstance(same[0], Reports):
                assert list(same[0]) == list(same[1])
            elif field.name != "deltas":
                assert same[0] == same[1], field.name
    assert list(sent.deltas) == [2]


def default_of(field: Field) -> object:
    return field.default if field.default_factory is MISSING else field.default_factory()


def test_crossing_makes_no_objects():
    sent = pickle.dumps(OutputDelta(0, logprobs=Reports([{7: Logprob(-1.0, 1)}])))
    assert b"Logprob" not in sent


def test_deltas_with_and_without_reports():
    one, other = [{1: Logprob(-0.5, 1)}], [{2: Logprob(-0.25, 3)}]
    for before, after in ((one, None), (None, one), (one, other), (None, None)):
        delta = OutputDelta(0, logprobs=before and Reports(before))
        delta.extend(OutputDelta(0, logprobs=after and Reports(after)))
        assert list(delta.logprobs or ()) == (before or []) + (after or [])
