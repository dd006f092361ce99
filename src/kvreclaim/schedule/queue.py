"""The queue of waiting sequences, and the choice of the next."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter
from typing import Generic, Protocol, TypeVar

from kvreclaim.schedule.sequence import ScheduledSequence

Seq = TypeVar("Seq", bound=ScheduledSequence)
Tenant = str | None
WINDOW = 128
"""Sequences of a line that are reordered at a time."""


class Order(Protocol[Seq]):
    """An order of a line other than its own."""

    def begin_step(self) -> None: ...

    def sorted(self, window: list[Seq]) -> list[Seq]: ...


@dataclass(slots=True, eq=False)
class Line(Generic[Seq]):
    """The waiting sequences of one tenant, in order.

    since:  its place among tenants with equally many seats; grows with each sequence that starts
    passed: times that another tenant's sequence started because the first one did not fit
    ranked: candidates for this step among the first num_ranked, the first one last
    """

    since: int
    seqs: list[Seq] = field(default_factory=list)
    passed: int = 0
    ranked: list[Seq] = field(default_factory=list)
    num_ranked: int = 0

    def rewind(self) -> None:
        self.ranked, self.num_ranked = [], 0


class Queue(Generic[Seq]):
    """Waiting sequences: a line for each tenant, by arrival, or by rank. order: sorts WINDOW sequences of a
    line at a time; None: the line's own order.

    Choosing the tenant costs O(waiting tenants), inserting into a line one shift of that line.
    """

    def __init__(self, *, by_rank: bool) -> None:
        self._by_rank = by_rank
        self._lines: dict[Tenant, Line[Seq]] = {}
        self._num_begun = 0
        self.order: Order[Seq] | None = None

    def order_by(self, order: Order[Seq]) -> None:
        """Choose the next of a line by this order instead of the line's own."""
        self.order = order

    def __len__(self) -> int:
        return sum(len(line.seqs) for line in self._lines.values())

    def __iter__(self) -> Iterator[Seq]:
        return chain.from_iterable(line.seqs for line in self._lines.values())

    @property
    def tenants(self) -> Set[Tenant]:
        """Tenants with waiting sequences."""
        return self._lines.keys()

    def line(self, tenant: Tenant) -> Line[Seq]:
        """Return the line of a waiting tenant."""
        return self._lines[tenant]

    def add(self, seq: Seq) -> None:
        """Append to its line, or insert by rank."""
        if self._by_rank:
            self.insert(seq)
        else:
            self._line_for(seq).seqs.append(seq)

    def add_back(self, seq: Seq) -> None:
        """Return a sequence that ran to the front of its line, or insert by rank."""
        if self._by_rank:
            self.insert(seq)
        else:
            line = self._line_for(seq)
            line.seqs.insert(0, seq)
            line.rewind()

    def insert(self, seq: Seq) -> None:
        """Insert a sequence by its rank."""
        line = self._line_for(seq)
        insort(line.seqs, seq, key=attrgetter("rank"))
        line.rewind()

    def remove(self, seq: Seq) -> None:
        """Remove a sequence if it is queued."""
        line = self._lines.get(seq.tenant)
        if line is not None and seq in line.seqs:
            line.seqs.remove(seq)
            line.rewind()
            if not line.seqs:
                del self._lines[seq.tenant]

    def begin(self, seq: Seq) -> None:
        """Dequeue the first of a line to run."""
        line = self._lines[seq.tenant]
        self._num_begun += 1
        line.since, line.passed = self._num_begun + 1, 0  # behind tenants that come before the next start
        self.remove(seq)

    def begin_step(self) -> None:
        """Reconsider sequences that were passed over."""
        for line in self._lines.values():
            line.rewind()
        if self.order is not None:
            self.order.begin_step()

    def next(
        self, num_running: Callable[[Tenant], int], skip: Set[Tenant], deferred: Set[int] = frozenset()
    ) -> Seq | None:
        """Choose among the most important waiting sequences: the first of the tenant with the fewest running,
        of equals the one served least recently. skip: tenants to omit; deferred: ids of sequences to omit."""
        found, least = None, None
        for tenant, line in self._lines.items():
            if tenant not in skip:
                first = self._first(line, deferred)
                if first is None:
                    continue
                turn = first.priority, num_running(tenant), line.since, first.first_id, first.index
                if least is None or turn < least:
                    found, least = first, turn
        return found

    def _first(self, line: Line[Seq], deferred: Set[int]) -> Seq | None:
        while True:
            while line.ranked and line.ranked[-1].seq_id in deferred:
                line.ranked.pop()
            if line.ranked:
                return line.ranked[-1]
            window = line.seqs[line.num_ranked : line.num_ranked + WINDOW]
            if not window:
                return None
            line.num_ranked += len(window)
            window = [seq for seq in window if seq.seq_id not in deferred]
            line.ranked = (window if self.order is None else self.order.sorted(window))[::-1]

    def _line_for(self, seq: Seq) -> Line[Seq]:
        line = self._lines.get(seq.tenant)
        if line is None:
            line = self._lines[seq.tenant] = Line(self._num_begun)
        return line
