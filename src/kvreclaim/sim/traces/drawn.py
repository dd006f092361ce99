"""Random requests: arrivals by a distribution, conversations with think times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.traces.trace import Trace

ARRIVALS = ("poisson", "gamma", "even")
PREFIX_PIECE = 1 << 20
"""Tokens of a piece that no prefix fills."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival times of requests.

    rate:       a second, mean
    how:        poisson; gamma: in bursts, or more evenly, by `burstiness` (coefficient of variation of the
                gaps: 1 is poisson); even
    """

    rate: float
    how: str = "poisson"
    burstiness: float = 2.0
    seed: int = 0

    def times(self, count: int) -> list[float]:
        """Ascending, the first at 0."""
        random, now, found = Random(self.seed), 0.0, []
        shape = 1 / self.burstiness**2
        for _ in range(count):
            found.append(now)
            if self.how == "poisson":
                now += random.expovariate(self.rate)
            elif self.how == "gamma":
                now += random.gammavariate(shape, 1 / (shape * self.rate))
            else:
                now += 1 / self.rate
        return found

    def over(self, trace: Trace) -> Trace:
        """A trace's requests in their order at these times."""
        times = self.times(len(trace.requests))
        pairs = zip(trace.requests, times, strict=True)
        return replace(trace, requests=[replace(request, arrival_s=time) for request, time in pairs])


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Requests or conversations of one distribution.

    count:      number of conversations
    prompt, output: tokens of each turn's question and answer; the first question follows `prefix` tokens that
                all share
    turns:      turns per conversation, 1 for single requests; each prompt begins with all turns before it
    think_s:    mean time from an answer to the next question, exponential
    vary:       coefficient of variation of prompt and output lengths, gamma; 0: none
    """

    count: int
    prompt: int
    output: int
    prefix: int = 0
    turns: int = 1
    think_s: float = 0.0
    vary: float = 0.0
    seed: int = 0

    def trace(self, arrivals: Arrivals) -> Trace:
        """Conversations begin at these arrivals."""
        random, firsts = Random(self.seed), []
        later: dict[int | None, list[SimRequest]] = {}
        for session, time in enumerate(arrivals.times(self.count)):
            turns = self._turns(session, random)
            firsts.append(replace(turns[0], arrival_s=time))
            later[session] = turns[1:]
        return Trace(firsts, knows_content=True, later=later if self.turns > 1 else {}, name="drawn")

    def _turns(self, session: int, random: Random) -> list[SimRequest]:
        length, found = self.prefix, []
        ids: tuple[str, ...] = ("prefix",) if self.prefix else ()
        for _ in range(self.turns):
            length += self._length(self.prompt, random)
            output = self._length(self.output, random)
            think = random.expovariate(1 / self.think_s) if self.think_s else 0.0
            tail = ("session", session) if self.turns > 1 else None
            found.append(
                SimRequest(
                    think,
                    length,
                    output,
                    ids,
                    PREFIX_PIECE,
                    self.prefix,
                    tail,
                    session if self.turns > 1 else None,
                )
            )
            length += output
        return found

    def _length(self, mean: int, random: Random) -> int:
        if not self.vary:
            return mean
        shape = 1 / self.vary**2
        return max(1, round(random.gammavariate(shape, mean / shape)))
