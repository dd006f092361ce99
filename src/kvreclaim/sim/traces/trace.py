"""A trace: requests by arrival, and turns that follow on answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvreclaim.checks import require
from kvreclaim.sim.request import RequestRecord, SimRequest


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests to simulate.

    requests:      by arrival
    knows_content: equal prompts are known; else every prompt is new, and hit rates mean nothing
    later:         later turns of each session; arrival_s: seconds after the previous answer
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
        """Multiply the request rate; think times stay."""
        require(speed > 0, f"speed is {speed}; it must be above 0, 2 for twice as many a second.", "speed")
        return replace(self, requests=[replace(x, arrival_s=x.arrival_s / speed) for x in self.requests])

    def first(self, count: int | None) -> Trace:
        """Return the first requests from outside, with all that follow on them."""
        return self if count is None else replace(self, requests=self.requests[:count])

    def follow(self) -> Follower | None:
        """Return a source of later turns, one per run; None without any."""
        return Follower(self) if any(self.later.values()) else None


class Follower:
    """Hands out the turns of each session, one after another."""

    def __init__(self, trace: Trace) -> None:
        self._left = {session: list(reversed(turns)) for session, turns in trace.later.items()}

    def __call__(self, request: SimRequest, record: RequestRecord) -> SimRequest | None:
        left = self._left.get(request.session) if request.session is not None else None
        if not left:
            return None
        assert record.end_s is not None, f"request {record.number} has not ended"
        turn = left.pop()
        return replace(turn, arrival_s=record.end_s + turn.arrival_s)
