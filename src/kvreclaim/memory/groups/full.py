"""Layers with full attention: their tables hold every token and have the lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence

from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import INDEXED, blocks_for
from kvreclaim.memory.changes import CompactionPlan, Shrunk, TableState
from kvreclaim.memory.check import check_plan, check_table
from kvreclaim.memory.groups.group import GroupManager
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import Entry
from kvreclaim.memory.prefix_cache import PrefixCache, PrefixMatch


class BlockTables(dict[int, BlockTable]):
    """Tables by sequence id. Raises: UnknownRequestError for a sequence that holds no blocks."""

    def __missing__(self, seq_id: int) -> BlockTable:
        raise UnknownRequestError(
            f"sequence {seq_id} holds no blocks; {len(self)} sequences do; admit it first"
        )


class FullAttentionGroup(GroupManager):
    """The group of full attention. Only its tokens are compressed, found by prefix and offloaded.

    tables: every sequence's table; read-only for others
    """

    def __init__(self, pool: BlockPool, block_size: int, held: Counter[int], prefix: PrefixCache) -> None:
        super().__init__(pool, block_size, held)
        self.prefix = prefix
        self.tables = BlockTables()
        self.freed_by_compression = 0

    def add(self, seq_id: int, table: BlockTable) -> None:
        """Begin a sequence with a table of blocks that are referenced already."""
        self.refuse_known(seq_id)
        self.tables[seq_id] = table

    def refuse_known(self, seq_id: int) -> None:
        """Check that a sequence is new. Raises: InvalidArgumentError."""
        if seq_id in self.tables:
            raise InvalidArgumentError(
                f"sequence {seq_id} exists already; an id names one live sequence; free it or use another"
            )

    def fit(self, entries: Sequence[Entry], most: int) -> int:
        return most

    def begin(self, seq_id: int, match: PrefixMatch, priority: int) -> None:
        self.tables[seq_id] = self.prefix.begin(match, priority)

    def fork(self, parent_id: int, child_id: int, child: BlockTable) -> None:
        for block in child.blocks():
            self.pool.touch(block)
        self.tables[child_id] = child

    def has_room(self, seq_id: int, table: BlockTable, num_tokens: int) -> bool:
        ids, size, start = table.block_ids, self.block_size, table.physical_len
        if start + num_tokens > len(ids) * size:
            return False
        tail = ids[start // size]
        return not start % size or (tail is not None and self.pool.refs[tail] == 1)

    def missing(self, seq_id: int, table: BlockTable, num_tokens: int) -> int:
        needed = -(-(table.physical_len + num_tokens) // self.block_size) - len(table.block_ids)
        return max(0, needed) + (num_tokens > 0 and self._shared_tail(table) is not None)

    def grow(
        self,
        seq_id: int,
        table: BlockTable,
        num_tokens: int,
        blocks: list[int],
        copies: list[tuple[int, int]],
        num_drafts: int = 0,
    ) -> None:
        missing = max(0, -(-(table.physical_len + num_tokens) // self.block_size) - len(table.block_ids))
        source = self._shared_tail(table) if num_tokens else None
        if not missing and source is None:
            return
        new = self.pool.allocate(missing + (source is not None))
        if source is not None:
            copies.append((source, new.pop(0)))
            table.replace(table.physical_len // self.block_size, copies[-1][1])
            self._held[source] += 1
        table.append(new)
        blocks += new

    def _shared_tail(self, table: BlockTable) -> int | None:
        """Return the partly written block of the next slot, if other sequences hold it too."""
        index, used = divmod(table.physical_len, self.block_size)
        if not used:
            return None
        tail = table.block_ids[index]
        assert tail is not None, f"entry {index} is written next and is a hole"
        refs = self.pool.refs[tail]
        return tail if refs > 1 and refs - self._held[tail] > 1 else None

    def commit(self, seq_id: int, table: BlockTable, num_tokens: int) -> None:
        start = table.physical_len
        room = len(table.block_ids) * self.block_size - start
        assert num_tokens <= room, f"sequence {seq_id}: {num_tokens} tokens written, room for {room}"
        assert not num_tokens or self._shared_tail(table) is None, f"sequence {seq_id}: wrote a shared block"
        table.advance(num_tokens)
        if table.chain is not None and start % self.block_size + num_tokens >= self.block_size:
            self.prefix.enter_full_blocks(table, start // self.block_size)

    def free(self, seq_id: int, table: BlockTable) -> int:
        del self.tables[seq_id]
        return self.pool.release(reversed(table.blocks()))

    def blocks(self, seq_id: int, table: BlockTable) -> list[int]:
        return table.blocks()

    def num_blocks(self, seq_id: int, table: BlockTable) -> int:
        return table.num_blocks

    def check(self, seq_id: int, table: BlockTable) -> None:
        check_table(seq_id, table, self.pool, self.block_size)

    # Compression.

    def table_state(self, table: BlockTable) -> TableState:
        """Return the table as input of a compaction plan."""
        ids, refs, marks = table.block_ids, self.pool.refs, self.pool.marks
        return TableState(
            ids,
            tuple(0 if block is None else refs[block] for block in ids),
            tuple(block is not None and marks[block] & INDEXED > 0 for block in ids),
        )

    def first_lacking(self, passes: Iterable[tuple[int, int]], unsure: Container[int] = ()) -> int | None:
        """Like MemoryManager's."""
        refs, held = self.pool.refs, self._held
        free = self.pool.num_free + sum(refs[block] == count for block, count in held.items())
        left: dict[int, int] = {}
        for seq_id, keep in passes:
            blocks = self.tables[seq_id].blocks()
            shared = [block for block in blocks if left.get(block, refs[block] - held[block]) > 1]
            own, needed = len(blocks) - len(shared), blocks_for(keep, self.block_size)
            if needed - own > free:
                return seq_id
            if seq_id in unsure:
                free += min(0, own - needed)
                continue
            free += own - needed
            left.update((block, left.get(block, refs[block] - held[block]) - 1) for block in shared)
        return None

    def shrink(self, plan: CompactionPlan[int], table: BlockTable) -> Shrunk:
        """Like MemoryManager's."""
        check_plan(plan, table, self.pool, self.block_size)
        for block in plan.strip:
            self.pool.unindex(block)
        fresh = self.pool.allocate(plan.targets.count(None))
        supply = iter(fresh)
        block_ids = tuple(next(supply) if target is None else target for target in plan.targets)
        kept = set(block_ids)
        dropped = [block for block in reversed(table.blocks()) if block not in kept]
        table.shrink(block_ids, plan.num_tokens)
        freed = self._dropped(dropped) - len(fresh)
        self.freed_by_compression += freed
        return Shrunk(block_ids, freed)

    def drop(self, seq_id: int, table: BlockTable, indices: Sequence[int]) -> int:
        """Like MemoryManager.drop_blocks."""
        full = table.physical_len // self.block_size
        wrong = [index for index in indices if not 0 <= index < full]
        assert not wrong, f"sequence {seq_id}: entry {wrong[0]} is not one of {full} full blocks"
        freed = self._dropped(table.drop(sorted(indices), self.block_size)[::-1])
        self.freed_by_compression += freed
        return freed

    def _dropped(self, blocks: Sequence[int]) -> int:
        """Release blocks that a pass drops. Returns: the number now held by idle sequences only, or none."""
        num_idle = self.pool.num_idle
        freed = self.pool.release(blocks)
        return freed + self.pool.num_idle - num_idle
