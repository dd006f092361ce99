"""No step verifies drafts beyond a pass, and a pass counts none whose fate is open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import hypothesis.strategies as st
from hypothesis import given
from list_pool import FakeRequest, make_ledger

from kvreclaim.integrations.vllm.settings.speculation import Drafts

PROMPT, END = 300, 700


@dataclass
class Speaker(FakeRequest):
    """known: tokens whose ids the scheduler has."""

    known: int = 0

    @property
    def num_tokens(self) -> int:
        return self.known


def lengths_of_passes(num_drafts: int, accepted: Sequence[int], ahead: bool, interval: int) -> list[int]:
    """As vLLM schedules one request. accepted: of the drafts of each step, in turns, as far as there are."""
    ledger = make_ledger(interval=interval)
    ledger.drafts = Drafts(3 * num_drafts, ahead)
    request = Speaker("r", PROMPT, num_computed_tokens=PROMPT, known=PROMPT + 1)
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
