"""How many blocks the ledger has vLLM leave free when a request is admitted."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given
from list_pool import FakeRequest, computed, make_ledger

from kvreclaim.integrations.vllm.live import step_observer as module
from kvreclaim.integrations.vllm.live.step_observer import Report
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.integrations.vllm.scheduler.passes import Totals
from kvreclaim.integrations.vllm.settings.speculation import Drafts


def room(ledger: Ledger, newcomer: FakeRequest, running: Sequence[FakeRequest]) -> int | None:
    """The room in a step of its own, in which no request is due."""
    assert ledger.compress(running) == []
    return ledger.room(newcomer, running)


def test_caps_follow_the_length_so_far() -> None:
    ledger = make_ledger()
    long, short = FakeRequest("a", 5000), FakeRequest("b", 100)
    caps = ledger.caps(long)
    assert caps is not None
    assert (caps.prefill, caps.settled) == (-(-(256 + 127 + 2048) // 32), 12)
    caps = ledger.caps(short)
    assert caps is not None
    assert (caps.prefill, caps.settled) == (4, 4)
    assert ledger.caps(FakeRequest("c", 5000, "off")) is None


def test_room_admits_what_fits_together_in_the_end() -> None:
    """129 blocks hold ten requests of 12 blocks, but not eleven."""
    ledger = make_ledger()
    running = [computed(ledger, f"r{n}", 100, 383) for n in range(10)]
    newcomer = FakeRequest("new", 800)
    assert ledger.pool.num_free == 129 - 10 * 12
    assert room(ledger, newcomer, running) is None
    ledger.pool.drop("r9")
    assert room(ledger, newcomer, running[:9]) == 0
    assert room(ledger, newcomer, []) == 0
    assert room(ledger, FakeRequest("off", 800, "off"), running) == 0


def test_room_counts_what_is_missing_until_prompts_are_computed() -> None:
    """Five that take another block each, and one whose prompt has just begun."""
    ledger = make_ledger(num_blocks=60)
    running = [computed(ledger, f"r{n}", 100, 256) for n in range(5)]
    for request in running:
        request.grow(1)
    assert ledger.pool.num_free == 60 - 5 * 8
    assert room(ledger, FakeRequest("new", 800), running) == 5
    assert room(ledger, FakeRequest("new", 800), [*running, computed(ledger, "x", 800, 64)]) is None


def test_room_is_vllms_own_for_requests_that_may_never_be_compressed() -> None:
    """However long the others may get, and whatever they share."""
    ledger = make_ledger(num_blocks=40, budget=4096)
    running = [computed(ledger, "a", 640, 640)]
    for n in range(9):
        twin = FakeRequest(f"twin{n}", 640)
        ledger.pool.tables[twin.request_id] = list(ledger.pool.tables["a"])
        for block in ledger.pool.held("a"):
            ledger.pool.refs[block] += 1
        twin.grow(640)
        running.append(twin)
    assert room(ledger, FakeRequest("new", 600), running) == 0
    assert room(ledger, FakeRequest("long", 700), running) is None


def test_room_keeps_a_prompt_under_way_its_peak() -> None:
    ledger = make_ledger()
    half = computed(ledger, "half", 800, 320)
    assert ledger.compress([half]) == []
    assert room(ledger, FakeRequest("new", 800), [half]) == 25 - 10


def test_room_keeps_the_peak_of_a_preempted_request_that_is_computed_again() -> None:
    """Such a request is past its prompt, and still takes whole chunks."""
    ledger = make_ledger()
    back = computed(ledger, "back", 100, 320)
    back.drawn = 700
    assert room(ledger, FakeRequest("new", 800), [back]) == 25 - 10


def test_newcomers_of_the_same_step_count() -> None:
    """A request seen before in the step is not looked at again; one that has come since is."""
    ledger = make_ledger(num_blocks=48)
    running = [computed(ledger, "a", 800, 64)]
    assert room(ledger, FakeRequest("new", 800), running) == 25 - 2
    running.append(computed(ledger, "b", 800, 320))
    assert ledger.room(FakeRequest("new", 800), running) == 25 - 2 + 25 - 10
    running.append(computed(ledger, "c", 100, 383))
    assert ledger.room(FakeRequest("new", 800), running) == 25 - 2 + 25 - 10
    running.append(computed(ledger, "d", 100, 383))
    assert ledger.room(FakeRequest("new", 800), running) is None


PROMPT, END = 300, 700


@dataclass
class DecodingRequest(FakeRequest):
    """known: tokens whose ids the scheduler has."""

    known: int = 0

    @property
    def num_tokens(self) -> int:
        return self.known


def lengths_of_passes(num_drafts: int, accepted: Sequence[int], ahead: bool, interval: int) -> list[int]:
    """Lengths at a request's passes in vLLM's schedule. accepted: drafts of each step, in turns, if any."""
    ledger = make_ledger(interval=interval)
    ledger.drafts = Drafts(3 * num_drafts, ahead)
    request = DecodingRequest("r", PROMPT, num_computed_tokens=PROMPT, known=PROMPT + 1)
    assert ledger.pool.grow("r", PROMPT)
    in_flight: list[int] = []
    lengths, num_steps = [], 0
    while request.known < END:
        for done in ledger.compress([request]):
            assert not any(in_flight)
            lengths.append(done.logical_len)
        drafts = len(request.spec_token_ids)
        count = request.known + request.num_output_placeholders + drafts - request.num_computed_tokens
        assert count == 1 + drafts
        request.num_computed_tokens += count
        assert ledger.pool.grow("r", request.num_computed_tokens + num_drafts)
        request.num_output_placeholders += count if ahead else 0
        in_flight.append(drafts)
        if len(in_flight) > ahead:
            drafts = in_flight.pop(0)
            right = min(drafts, accepted[num_steps % len(accepted)])
            request.num_computed_tokens -= drafts - right
            request.num_output_placeholders -= 1 + drafts if ahead else 0
            request.known += 1 + right
            num_steps += 1
        request.spec_token_ids = [-1] * num_drafts
        figures = ledger.figures(request)
        assert figures is not None
        assert figures["kv_tokens"] == request.known - 1 - figures["tokens_evicted"], (
            "drafts in flight do not count"
        )
    return lengths


@given(
    num_drafts=st.integers(1, 9),
    accepted=st.lists(st.integers(0, 9), min_size=1, max_size=20),
    ahead=st.booleans(),
    interval=st.integers(32, 60),
)
def test_passes_fall_where_they_fall_without_drafts(
    num_drafts: int, accepted: list[int], ahead: bool, interval: int
) -> None:
    expected = lengths_of_passes(0, [0], False, interval)
    assert len(expected) > 6
    assert lengths_of_passes(num_drafts, accepted, ahead, interval)[: len(expected) - 1] == expected[:-1]


LINE = (
    "kvreclaim: 2,000 passes: 64,500 tokens evicted, 2,020 blocks given back (50 % of those that requests "
    "have had); the last 1,000 took 5.0 % of 20 s"
)


def test_every_figure_is_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kvreclaim")
    lines = caplog.records
    totals, now = Totals(), [100.0]
    pool: Any = SimpleNamespace(places={"a": 3000, "b": 1000, "c": 40}.__getitem__)
    report = Report(totals, pool, lambda: now[0])
    totals.compactions, totals.seconds = 1001, 3.0
    now[0] = 130.0
    report.passed([])
    assert len(lines) == 1
    report.ending("a")
    totals.compactions, totals.seconds = 2003, 4.0
    totals.tokens_evicted, totals.blocks_freed = 64_500, 2020
    now[0] = 150.0
    report.passed(["b", "c"])
    assert lines[-1].getMessage() == LINE
    assert lines[-1].levelno == logging.INFO
    report.passed(["b", "c"])
    assert len(lines) == 2


def test_one_line_for_each_thousand_passes_of_a_ledger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kvreclaim")
    lines = caplog.records
    monkeypatch.setattr(module, "EVERY", 10)
    ledger = make_ledger(budget=256, interval=32)
    report = Report(ledger.totals, ledger.pool)
    requests = [computed(ledger, f"r{number}", 300, 300) for number in range(3)]
    for _ in range(640):
        for request in requests:
            assert ledger.pool.grow(request.request_id, request.num_computed_tokens + 1)
            request.grow(1)
        ledger.compress(requests)
        report.passed(request.request_id for request in requests)
    assert ledger.totals.compactions > 50
    reported = [int(re.findall(r"kvreclaim: (\d+) passes", line.getMessage())[0]) for line in lines]
    assert reported == list(range(10, ledger.totals.compactions + 1, 10))
    had = sum(ledger.pool.places(request.request_id) for request in requests)
    shares = [int(re.findall(r"\((\d+) %", line.getMessage())[0]) for line in lines]
    assert abs(shares[-1] - 100 * ledger.totals.blocks_freed / had) <= 5
    assert shares == sorted(shares)
