"""Requests that are sent, and what follows on answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvreclaim.checks import require
from kvreclaim.sim.request import RequestRecord, SimRequest


@dataclass(frozen=True, slots=True)
class Trace:
    """requests:      by arrival
    knows_content: whether equal prompts can be told; else every prompt is new, and hit rates say nothing
    later:         by session, its further turns in their order; arrival_s: seconds after the answer before
    """

    requests: list[SimRequest]
    knows_content: bool
    later: Mapping[int | None, list[SimRequest]] = field(default_factory=dict)
    name: str = ""
    form: str = ""

    @property
    def num_requests(self) -> int:
        return len(self.requests) + sum(map(len, self.later.values()))

    @property
    def span_s(self) -> float:
        """Between the first and the last arrival from outside."""
        return self.requests[-1].arrival_s - self.requests[0].arrival_s

    def sped(self, speed: float) -> Trace:
        """So many times as many requests a second; think times stay."""
        require(speed > 0, f"speed is {speed}; it must be above 0, 2 for twice as many a second.", "speed")
        return replace(self, requests=[replace(x, arrival_s=x.arrival_s / speed) for x in self.requests])

    def first(self, count: int | None) -> Trace:
        """Only the first so many from outside, with all that follows on them."""
        return self if count is None else replace(self, requests=self.requests[:count])

    def follow(self) -> Follower | None:
        """A source of the next turns, one per run; None: there are none."""
        return Follower(self) if any(self.later.values()) else None


class Follower:
    """Hands out the turns of each session, one after another."""

    def __init__(self, trace: Trace) -> None:
        self._left = {session: list(reversed(turns)) for session, turns in trace.later.items()}

    def __call__(self, asked: SimRequest, record: RequestRecord) -> SimRequest | None:
        left = self._left.get(asked.session) if asked.session is not None else None
        if not left:
            return None
        assert record.end_s is not None, f"request {record.number} has not ended"
        turn = left.pop()
        return replace(turn, arrival_s=record.end_s + turn.arrival_s)
