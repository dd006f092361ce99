"""Replicas behind a router, event by event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import floor, inf

from kvreclaim.memory.stats import MemoryStats
from kvreclaim.plan.cost import StepTime
from kvreclaim.sim.content import Links
from kvreclaim.sim.replica import Replica
from kvreclaim.sim.request import RequestRecord, SimRequest
from kvreclaim.sim.routers import Router, make_router
from kvreclaim.sim.settings import Settings

Follow = Callable[[SimRequest, RequestRecord], SimRequest | None]
"""The next request of a conversation, given the last one and what became of it. arrival_s: when it comes."""


@dataclass(frozen=True, slots=True)
class ClusterSample:
    """All replicas together at a moment: blocks in use, running and waiting requests, and prompt tokens found
    and looked up since the beginning."""

    time_s: float
    blocks: int
    running: int
    waiting: int
    hit_tokens: int
    query_tokens: int


@dataclass(slots=True)
class SimulationResult:
    """Results of a simulation.

    refused: requests that no replica could ever run
    why:     their number by reason
    """

    records: list[RequestRecord]
    refused: list[SimRequest]
    replicas: list[Replica]
    samples: list[ClusterSample]
    makespan_s: float = 0.0
    memory: list[MemoryStats] = field(default_factory=list)
    why: Counter[str] = field(default_factory=Counter)

    @property
    def preemptions(self) -> Counter[str]:
        return sum((replica.preemptions for replica in self.replicas), Counter())


class Cluster:
    """Deterministic: events at one time happen in the order arrivals, looks of the router, ends of steps.

    Args:
        num_replicas: >= 1, each with `settings`
        router:       name; scrape_s: how old what it knows may be, 0: not at all
        sample_s:     between samples
        follow:       the next turn of a conversation, given the answer
    """

    def __init__(
        self,
        settings: Settings,
        cost: StepTime,
        *,
        num_replicas: int = 1,
        router: str = "rr",
        scrape_s: float = 0.0,
        sample_s: float | None = None,
        follow: Follow | None = None,
    ) -> None:
        self.links = Links(settings.block_size)
        self.replicas = [Replica(i, settings, cost, self.links) for i in range(num_replicas)]
        pieces = settings.num_blocks * settings.block_size // 512
        self.router: Router = make_router(router, num_replicas, pieces)
        self.needs_prefix = router == "prefix"
        self.scrape_s, self.follow = scrape_s, follow
        self._loads = [0] * num_replicas if scrape_s else self.router.loads
        self._events: list[tuple[float, int, int, int]] = []
        self._order = count()
        self._numbers = count()
        self._next_look_s = scrape_s
        self._sample_s = sample_s
        self._next_sample_s = 0.0
        self._later: list[tuple[float, int, SimRequest]] = []
        self._out = SimulationResult([], [], self.replicas, [])

    def run(self, requests: Iterable[SimRequest], *, until_s: float = inf) -> SimulationResult:
        """Serve all requests, which come in the order of their arrival, to their ends, or up to a time: what
        has not happened by then has no time in its record."""
        coming, out = iter(requests), self._out
        upcoming = self._next(coming)
        while upcoming is not None or self._events:
            if (
                min(upcoming.arrival_s if upcoming else inf, self._events[0][0] if self._events else inf)
                > until_s
            ):
                break
            if upcoming is not None and (not self._events or upcoming.arrival_s <= self._events[0][0]):
                self._tick(upcoming.arrival_s)
                self._arrive(upcoming)
                upcoming = self._next(coming)
            else:
                now, _, number, version = heappop(self._events)
                replica = self.replicas[number]
                if version == replica.version:
                    self._tick(now)
                    out.makespan_s = now
                    self._advance(replica, now)
                    if self._later:
                        upcoming = self._earlier(upcoming)
        out.memory = [replica.memory.stats() for replica in self.replicas]
        out.records.sort(key=lambda record: record.number)
        return out

    def _next(self, coming: Iterator[SimRequest]) -> SimRequest | None:
        found = next(coming, None)
        return self._earlier(found) if self._later else found

    def _earlier(self, upcoming: SimRequest | None) -> SimRequest | None:
        """Return the earliest of the next request from outside and the turns that follow on answers."""
        if upcoming is None:
            return heappop(self._later)[2] if self._later else None
        if self._later and self._later[0][0] < upcoming.arrival_s:
            found = heappop(self._later)[2]
            heappush(self._later, (upcoming.arrival_s, next(self._order), upcoming))
            return found
        return upcoming

    def _arrive(self, request: SimRequest) -> None:
        number, now = next(self._numbers), request.arrival_s
        known: list[int] = []
        if self.needs_prefix:
            numbers, counts = self.links.walk(request.tokens(number))
            known = numbers[: len(counts) + (request.tail is not None)]
        chosen = self.router.choose(known)
        replica = self.replicas[chosen]
        seq = replica.sequence(number, request, now)
        if isinstance(seq, str):
            self._out.refused.append(request)
            self._out.why[seq] += 1
            return
        self.router.loads[chosen] += 1
        if self.scrape_s:
            self._loads[chosen] += 1
        self._out.records.append(seq.record)
        replica.send(seq)
        if replica.leap is not None:
            replica.leap.cut(now)
            self._push(replica.leap.end_s(replica.leap.num_steps), replica)
        elif not replica.is_busy and len(replica.inbox) == 1:
            self._push(now, replica)

    def _push(self, time_s: float, replica: Replica) -> None:
        """Set the next event of a replica."""
        replica.version += 1
        heappush(self._events, (time_s, next(self._order), replica.number, replica.version))

    def _advance(self, replica: Replica, now: float) -> None:
        if replica.is_busy:
            ended = replica.finish(now)
            self._loads[replica.number] -= len(ended)
            if self.follow is not None and ended:
                for seq in ended:
                    request = self.follow(seq.request, seq.record)
                    if request is not None:
                        heappush(self._later, (request.arrival_s, next(self._order), request))
                self._push(now, replica)  # what comes at this very moment comes first
                return
        end = replica.begin(now)
        if end is not None:
            self._push(end, replica)

    def _tick(self, now: float) -> None:
        """Update the router and take a sample when they are due; nothing has changed since the last event."""
        if self.scrape_s and now >= self._next_look_s:
            self.router.loads[:] = self._loads
            self._next_look_s = (floor(now / self.scrape_s) + 1) * self.scrape_s
        if self._sample_s and now >= self._next_sample_s:
            self._out.samples.append(self._sample(now))
            self._next_sample_s = (floor(now / self._sample_s) + 1) * self._sample_s

    def _sample(self, now: float) -> ClusterSample:
        replicas = self.replicas
        stats = [replica.memory.stats() for replica in replicas]
        return ClusterSample(
            now,
            sum(each.in_use for each in stats),
            sum(len(replica.scheduler.running) for replica in replicas),
            sum(len(replica.scheduler.waiting) + len(replica.inbox) for replica in replicas),
            sum(each.prefix_hit_tokens for each in stats),
            sum(each.prefix_query_tokens for each in stats),
        )
