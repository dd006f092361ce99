"""The pool and its index in runs."""

from __future__ import annotations

from itertools import count

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.prefix.index import COLD, EVICTED, NUM_REMEMBERED
from kvreclaim.sim.extents.run import ROOT, Link, Node, Run, RunQueue, RunTable


class Evicted:
    """Entries that were evicted lately, as in PrefixIndex: the last `remembered` at least, twice as many at
    most. A bit for each place of a node."""

    def __init__(self, remembered: int) -> None:
        self.remembered = remembered
        self._now: dict[int, int] = {}
        self._before: dict[int, int] = {}
        self._count = 0

    def add(self, node: int, start: int, end: int) -> None:
        """Places start .. end - 1, the last one first."""
        mask, have = ((1 << (end - start)) - 1) << start, self._now.get(node, 0)
        new = (mask & ~have).bit_count()
        if self._count + new < self.remembered:
            self._now[node] = have | mask
            self._count += new
            return
        for place in range(end - 1, start - 1, -1):
            if self._count >= self.remembered:
                self._before, self._now, self._count = self._now, {}, 0
            have = self._now.get(node, 0)
            self._count += not have >> place & 1
            self._now[node] = have | 1 << place

    def __contains__(self, link: tuple[int, int]) -> bool:
        node, place = link
        return bool((self._now.get(node, 0) | self._before.get(node, 0)) >> place & 1)


class ExtentPool:
    """BlockPool and PrefixIndex under the order lru, without pins. Every operation costs O(runs it names)."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise InvalidArgumentError(
                f"num_blocks is {num_blocks}; a pool has at least 1 block; give the KV cache more memory"
            )
        self.num_blocks = self.num_free = num_blocks
        self.num_cached = self.num_evictions = self.peak_in_use = 0
        self.queue = RunQueue(num_blocks)
        self.nodes: dict[int, Node] = {}
        self.evicted = Evicted(max(1, min(num_blocks, NUM_REMEMBERED)))
        self._epochs = count()
        self.version = 0

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, n: int) -> None:
        """Take the next n blocks of the queue and remove them from the index."""
        assert 0 <= n <= self.num_free, f"{n} blocks wanted, {self.num_free} free"
        self.num_free -= n
        queue = self.queue
        while n:
            run = queue.end.after
            taken = min(n, run.count)
            node = run.node
            if node is not None:
                self.version += 1
                self.evicted.add(node.number, run.start + run.count - taken, run.start + run.count)
                self.num_cached -= taken
                self.num_evictions += taken
                if taken == run.count:
                    node.runs.remove(run)
            run.count -= taken
            if not run.count:
                queue.remove(run)
            n -= taken
        in_use = self.num_blocks - self.num_free
        if in_use > self.peak_in_use:
            self.peak_in_use = in_use

    def hold(self, run: Run, num_blocks: int, table: RunTable) -> None:
        """A request was found in the first blocks of a run, which are its table's from now on."""
        if num_blocks < run.count:
            run = self.split(run, num_blocks)
        if not run.holders:
            self.queue.remove(run)
            self.num_free -= run.count
            self.num_cached -= run.count
            self.peak_in_use = max(self.peak_in_use, self.num_in_use)
        run.holders.append(table)
        table.runs.append(run)

    def drop(self, run: Run, table: RunTable) -> int:
        """Remove a run from a table. Returns: blocks without a holder now."""
        run.holders.remove(table)
        if run.holders:
            return 0
        if run.node is None:
            self.queue.push_blank(run.count)
        else:
            self.queue.push(run)
            self.num_cached += run.count
        self.num_free += run.count
        return run.count

    def drop_blank(self, num_blocks: int) -> int:
        """Drop blocks of one table outside the index. Returns: as drop."""
        if num_blocks:
            self.queue.push_blank(num_blocks)
            self.num_free += num_blocks
        return num_blocks

    def split(self, run: Run, num_blocks: int) -> Run:
        """Cut a run that can be found. Returns: its first num_blocks, which stay next to the rest: before
        it in tables, behind it in the queue."""
        node = run.node
        assert node is not None, "a run outside the index is cut"
        if run.holders:
            rest = Run(node, run.start + num_blocks, run.count - num_blocks, run.epoch)
            rest.parent = run.link(rest.start - 1)
            run.count = num_blocks
            for table in run.holders:
                table.runs.insert(table.runs.index(run) + 1, rest)
            rest.holders = list(run.holders)
            node.add(rest)
            return run
        first = Run(node, run.start, num_blocks, run.epoch, run.parent)
        run.start += num_blocks
        run.count -= num_blocks
        run.parent = first.link(run.start - 1)
        self.queue.insert(run, first)
        node.add(first)
        return first

    def unindex(self, run: Run, num_blocks: int) -> None:
        """Let no hit find the first blocks of a run any more, wherever they are."""
        self.version += 1
        first = self.split(run, num_blocks) if num_blocks < run.count else run
        node = first.node
        assert node is not None, "a run outside the index is stripped"
        node.runs.remove(first)
        first.node = None
        if not first.holders:
            self.num_cached -= first.count

    def is_live(self, link: Link) -> bool:
        """Whether a walk can still come through this very entry."""
        if link is ROOT:
            return True
        run = self.nodes[link[0]].at(link[2])
        return run is not None and run.epoch == link[1]

    def why_missing(self, number: int, place: int) -> str:
        """Why no entry at this place follows what came before it."""
        node = self.nodes.get(number)
        there = node is not None and node.at(place) is not None
        return EVICTED if there or (number, place) in self.evicted else COLD

    def enter(self, table: RunTable, num_blocks: int) -> None:
        """The next full blocks of a table can be found from now on, as far as no equal ones can."""
        numbers, counts = table.keys.groups
        while num_blocks:
            chain = table.chain
            if chain is None or not (table.follows_growing(chain) or self.is_live(chain)):
                table.chain = None
                return
            group, place = table.group, table.place
            wanted = num_blocks if group == len(counts) else min(num_blocks, counts[group] - place)
            if not wanted:
                table.group, table.place = group + 1, 0
                continue
            done = self._enter(table, numbers[group], chain, wanted)
            table.room -= done
            table.place += done
            num_blocks -= done

    def _enter(self, table: RunTable, number: int, chain: Link, wanted: int) -> int:
        """Some of the blocks that belong from table.place on. Returns: how many."""
        self.version += 1
        node, place = self.nodes.get(number), table.place
        if node is None:
            node = self.nodes[number] = Node(number)
        there = node.at(place) if node.runs else None
        if there is not None:
            done = min(wanted, there.end - place)
            if chain == (there.parent if place == there.start else there.link(place - 1)):
                own = Run(None, 0, done)
                own.holders.append(table)
                table.runs.append(own)
                table.chain = there.link(place + done - 1)
                table.repeated_len += done * table.keys.block_size
                return done
            self.unindex(there, done)
        else:
            done = min(wanted, node.room(place, wanted)) if node.runs else wanted
        last = table.runs[-1] if table.runs else None
        if (
            last is None
            or last is not table.growing
            or last.node is not node
            or chain != last.link(place - 1)
            or len(last.holders) > 1
        ):
            last = table.growing = Run(node, place, 0, next(self._epochs), chain)
            last.holders.append(table)
            table.runs.append(last)
            node.add(last)
        last.count += done
        table.chain = number, last.epoch, place + done - 1
        return done
