"""A request of a simulation, and its record."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from kvreclaim import schedule
from kvreclaim.plan.targets import Targets
from kvreclaim.sim.content import TraceTokens


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request before it is sent.

    arrival_s:  since the beginning; of one that another one triggers, when it was sent
    num_prompt, num_output: tokens
    ids, piece: what the prompt begins with, as names of pieces of so many tokens each, the last maybe partial
    num_ids:    leading tokens of the prompt that ids name; the others, and the answer, are the tail's
    tail:       name of these tokens; None: no other request has them
    session:    number of its conversation; None without one
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    ids: Sequence[Hashable] = ()
    piece: int = 512
    num_ids: int = 0
    tail: Hashable = None
    session: int | None = None
    priority: int = 0

    def tokens(self, number: int) -> TraceTokens:
        """The prompt's tokens; number: of the request, which names its own tail."""
        found = TraceTokens(self.num_prompt)
        found.ids, found.piece, found.num_ids = self.ids, self.piece, self.num_ids
        found.is_own = self.tail is None
        found.tail = ("own", number) if found.is_own else self.tail
        return found


@dataclass(slots=True)
class RequestRecord:
    """Record of a request. Times in seconds since the start; None: not reached."""

    number: int
    replica: int
    arrival_s: float
    num_prompt: int
    num_output: int
    scheduled_s: float | None = None
    first_token_s: float | None = None
    end_s: float | None = None
    preemptions: int = 0
    swaps: int = 0
    recomputed_tokens: int = 0
    hit_tokens: int = 0
    loaded_tokens: int = 0
    blocks_freed: int = 0
    passes: int = 0
    peak_blocks: int = 0
    session: int | None = None

    @property
    def request(self) -> SimRequest:
        return SimRequest(self.arrival_s, self.num_prompt, self.num_output)

    @property
    def ttft_s(self) -> float:
        assert self.first_token_s is not None, f"request {self.number} has no token"
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        assert self.end_s is not None, f"request {self.number} has not ended"
        return self.end_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time between tokens behind the first; None: there is only one."""
        return (self.e2e_s - self.ttft_s) / (self.num_output - 1) if self.num_output > 1 else None

    def keeps(self, targets: Targets) -> bool:
        """Whether a request that has ended met all targets."""
        return (
            (targets.ttft_s is None or self.ttft_s <= targets.ttft_s)
            and (targets.e2e_s is None or self.e2e_s <= targets.e2e_s)
            and (targets.tpot_s is None or (self.tpot_s or 0.0) <= targets.tpot_s)
        )


@dataclass(slots=True, eq=False, kw_only=True)
class Simulated(schedule.ScheduledSequence):
    """The only output of a request while it waits or runs. most_computed: maximum of num_computed."""

    request: SimRequest
    record: RequestRecord
    most_computed: int = field(default=0)
