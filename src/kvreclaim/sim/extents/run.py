"""Runs of blocks, where they wait for reuse, and a sequence's table of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvreclaim.sim.content import TraceKeys

Link = tuple[int, int, int]
"""(node, epoch, place) of an entry that a block can follow. An epoch is never given twice, so equal links are
the very same entry."""
ROOT: Link = (-1, -1, -1)


class Run:
    """Blocks that are held, queued and found together. In a table they follow each other in this order; in
    the queue the last one is reused first.

    node:    they hold its places start .. start + count - 1; None: no hit finds them
    epoch:   with a place it names an entry
    parent:  what the first one follows
    holders: tables that have it; none: it is queued
    """

    __slots__ = ("after", "before", "count", "epoch", "holders", "node", "parent", "start")

    def __init__(
        self, node: Node | None, start: int, count: int, epoch: int = -1, parent: Link = ROOT
    ) -> None:
        self.node, self.start, self.count, self.epoch, self.parent = node, start, count, epoch, parent
        self.holders: list[RunTable] = []
        self.before = self.after = self

    @property
    def end(self) -> int:
        return self.start + self.count

    def link(self, place: int) -> Link:
        assert self.node is not None, "a run outside the index has no entries"
        return self.node.number, self.epoch, place


class Node:
    """A piece of content behind one beginning. runs: of its blocks that can be found, by place."""

    __slots__ = ("number", "runs")

    def __init__(self, number: int) -> None:
        self.number = number
        self.runs: list[Run] = []

    def at(self, place: int) -> Run | None:
        """The run that holds this place."""
        for run in self.runs:
            if run.start <= place < run.start + run.count:
                return run
        return None

    def room(self, place: int, count: int) -> int:
        """Free places before the next run, at most `count`."""
        return min((run.start - place for run in self.runs if run.start > place), default=count)

    def add(self, run: Run) -> None:
        runs = self.runs
        if runs and runs[-1].start > run.start:
            runs.append(run)
            runs.sort(key=lambda each: each.start)
        else:
            runs.append(run)


@dataclass(slots=True, eq=False)
class RunTable:
    """The blocks of one sequence: runs, then `room` of its own that no hit finds, the last ones maybe empty.

    chain:         what its next full block follows; None: its blocks are found no more
    group, place:  of keys.groups, where its next full block belongs
    growing:       the run that it entered last: no entry behind its end has ever had its epoch
    """

    keys: TraceKeys
    chain: Link | None
    priority: int = 0
    runs: list[Run] = field(default_factory=list)
    room: int = 0
    num_blocks: int = 0
    logical_len: int = 0
    physical_len: int = 0
    exact: bool = True
    group: int = 0
    place: int = 0
    repeated_len: int = 0
    growing: Run | None = None

    @property
    def block_ids(self) -> range:
        """Places, not ids: there are none."""
        return range(self.num_blocks)

    def follows_growing(self, link: Link) -> bool:
        """Whether this entry is in the run that this very table has entered last, and holds."""
        growing = self.growing
        return growing is not None and growing.epoch == link[1] and growing.node is not None

    def mark_inexact(self) -> None:
        self.exact, self.chain = False, None


class RunQueue:
    """Runs without holders in the order of reuse: a ring."""

    def __init__(self, num_blocks: int) -> None:
        self.end = Run(None, 0, 0)
        self.push(Run(None, 0, num_blocks))

    def __iter__(self) -> Iterator[Run]:
        run = self.end.after
        while run is not self.end:
            yield run
            run = run.after

    def push(self, run: Run) -> None:
        self.insert(self.end.before, run)

    def push_blank(self, count: int) -> None:
        """Push blocks outside the index, which are interchangeable."""
        last = self.end.before
        if last.node is None and last is not self.end:
            last.count += count
        else:
            self.push(Run(None, 0, count))

    def insert(self, before: Run, run: Run) -> None:
        """Insert a run behind another one."""
        after = before.after
        run.before, run.after = before, after
        before.after = after.before = run

    def remove(self, run: Run) -> None:
        before, after = run.before, run.after
        before.after, after.before = after, before
        run.before = run.after = run
