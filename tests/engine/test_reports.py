"""Log-probabilities that cross processes: the same after any way, and none made before they are read."""

from __future__ import annotations

import pickle
from dataclasses import fields

import hypothesis.strategies as st
from hypothesis import given

from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.sampling.logprobs import Logprob
from kvreclaim.engine.serving.core import OutputDelta, Reports, Update
from kvreclaim.engine.serving.messages import EngineUpdate

NUMBERS = st.builds(Logprob, st.floats(max_value=0.0), st.integers(1, 300_000))
REPORTS = st.lists(st.none() | st.dictionaries(st.integers(0, 300_000), NUMBERS, max_size=4), max_size=5)


@given(REPORTS, REPORTS)
def test_reports_are_what_was_given(first, second):
    """They are, after pickling and put together, in the order of each report, at every read."""
    sent, later = pickle.loads(pickle.dumps((Reports(first), Reports(second))))
    sent.extend(later)
    assert len(sent) == len(first) + len(second)
    for _ in range(2):
        assert list(sent) == first + second
        assert [r and list(r) for r in sent] == [r and list(r) for r in first + second]


REPORT = Reports([{1: Logprob(-0.5, 1)}])
UPDATES = [
    {"deltas": {2: OutputDelta(2, "a word", [5, 6])}},
    {"deltas": {0: OutputDelta(0)}},
    {"deltas": {}},
    {"deltas": {index: OutputDelta(index, "x", [1]) for index in (0, 1)}},
    {"deltas": {0: OutputDelta(0, "x", [1], REPORT)}},
    {"deltas": {0: OutputDelta(0, "x", [1], finish_reason="stop", stop_reason=7)}},
    {"deltas": {0: OutputDelta(0, "x", [1])}, "metrics": RequestMetrics(num_prompt_tokens=3)},
    {"deltas": {0: OutputDelta(0, "x", [1])}, "finished": True},
    {"deltas": {0: OutputDelta(0, "x", [1])}, "error": "lost"},
    {"deltas": {0: OutputDelta(0, "x", [1])}, "prompt_logprobs": Reports([None])},
]


def test_news_cross_whole():
    """A token and its text in one way, everything else in another: nothing is left out in either."""
    news = [(f"request-{i}", Update(**facts)) for i, facts in enumerate(UPDATES)]
    received = pickle.loads(pickle.dumps(EngineUpdate(3, news, "its death")))
    assert (received.num_waiting, received.death, len(received.news)) == (3, "its death", len(news))
    crossed = dict(received.news)
    for name, update in news:
        assert plain(crossed[name]) == plain(update), name
        assert crossed[name] is not update


def plain(value: object) -> object:
    """All fields, with the contents of reports."""
    if isinstance(value, Reports):
        return list(value)
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, Update | OutputDelta):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    return value


def test_crossing_makes_no_objects():
    sent = pickle.dumps(OutputDelta(0, logprobs=Reports([{7: Logprob(-1.0, 1)}])))
    assert b"Logprob" not in sent


def test_deltas_with_and_without_reports():
    one, other = [{1: Logprob(-0.5, 1)}], [{2: Logprob(-0.25, 3)}]
    for before, after in ((one, None), (None, one), (one, other), (None, None)):
        delta = OutputDelta(0, logprobs=before and Reports(before))
        delta.extend(OutputDelta(0, logprobs=after and Reports(after)))
        assert list(delta.logprobs or ()) == (before or []) + (after or [])
