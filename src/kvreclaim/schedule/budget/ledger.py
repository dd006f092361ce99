"""Apply a pass or a drop to a sequence's block table and counters; the bytes move later."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import CompactionPlan, Id, Shrunk, TableState
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.budget.compaction import Pass, plan_compaction
from kvreclaim.schedule.budget.drops import Drop, blocks_within
from kvreclaim.schedule.budget.footprint import Footprint


class LedgerPool(Protocol[Id]):
    """The block pool and the tables of all sequences. num_free: free blocks"""

    @property
    def num_free(self) -> int: ...

    def table_state(self, seq_id: Id) -> TableState:
        """The sequence's blocks in the order of their tokens."""

    def shrink(self, plan: CompactionPlan[Id]) -> Shrunk:
        """Make the plan's targets the sequence's table, keep it out of the prefix index from now on, and free
        all its other blocks."""


def compress(
    seq_id: Id,
    num_computed: int,
    num_prompt: int,
    footprint: Footprint,
    account: EvictionCounters,
    pool: LedgerPool[Id],
) -> Pass[Id] | None:
    """Compress a due sequence to its budget; updates account, pool and table.

    Where nothing moves, blocks are dropped later, after the choice.

    Returns: None if there are too few blocks, and nothing has changed.
    """
    live = num_computed - account.num_evicted
    keep = footprint.kept(live)
    assert keep < live, f"sequence {seq_id} is due with {live} tokens, of which {keep} stay"
    source_ids, shrunk = _in_blocks(seq_id, live, keep, footprint, pool)
    if shrunk is None:
        return None
    prompt = account.prompt_now(num_computed, num_prompt)
    done = Pass(
        seq_id,
        footprint.eviction_method,
        source_ids,
        shrunk.block_ids,
        num_tokens=live,
        keep=keep,
        logical_len=num_computed,
        prompt_slots=prompt,
        first=account.num_evicted == 0,
        blocks_freed=shrunk.blocks_freed,
    )
    _note(account, done, footprint)
    return done


def take_choice(
    done: Pass[int],
    gone: Sequence[int],
    prompt_slots: int | None,
    account: EvictionCounters,
    memory: MemoryManager,
) -> Pass[int]:
    """Apply a choice of whole blocks: drop these full entries of the sequence's table and set the leading
    prompt slots (None: as planned). Returns: the final pass."""
    memory.mark_inexact(done.seq_id)
    freed = memory.drop_blocks(done.seq_id, gone) if gone else 0
    account.blocks_freed += freed
    if prompt_slots is not None:
        account.prompt_slots = prompt_slots
    left = (block for index, block in enumerate(done.source_ids) if index not in set(gone))
    return replace(done, target_ids=tuple(left), blocks_freed=freed)


def drop_spans(
    seq_id: int,
    num_computed: int,
    footprint: Footprint,
    account: EvictionCounters,
    dropped: Sequence[int],
    memory: MemoryManager,
) -> tuple[Drop, tuple[int, ...]]:
    """Free the blocks wholly within a dropped span, of tokens since the last pass: no token moves.

    dropped: blocks dropped since the last pass, by their original indices
    Returns: the drop, and the new `dropped`.
    """
    assert footprint.drops is not None, f"sequence {seq_id} drops nothing"
    size, live = footprint.block_size, num_computed - account.num_evicted
    first, shift = account.last_computed, account.shift
    within = blocks_within(footprint.drops.spans, first, num_computed, shift, size)
    before = set(dropped)
    new = [block for block in within if block not in before]
    gone = sorted(dropped)
    entries = tuple(block - bisect_left(gone, block) for block in new)
    memory.mark_inexact(seq_id)
    freed = memory.drop_blocks(seq_id, entries) if entries else 0
    num_tokens = len(entries) * size
    account.num_evicted += num_tokens
    account.num_dropped += num_tokens
    account.dropped_since += num_tokens
    account.blocks_freed += freed
    account.blocks_perfect += len(entries)
    return Drop(seq_id, entries, live), tuple(sorted([*gone, *new]))


def _in_blocks(
    seq_id: Id, live: int, keep: int, footprint: Footprint, pool: LedgerPool[Id]
) -> tuple[tuple[int, ...], Shrunk | None]:
    """Returns: the blocks before and after; None: too few."""
    table = pool.table_state(seq_id)
    if footprint.eviction_method.equal_heads:
        held = len(table.block_ids)
        assert held == blocks_for(live, footprint.block_size), f"{seq_id}: {live} tokens in {held} blocks"
    source_ids = tuple(block for block in table.block_ids if block is not None)
    assert len(source_ids) == len(table.block_ids), f"{seq_id}: holes in its table {table.block_ids}"
    if not footprint.eviction_method.moves:
        return source_ids, Shrunk(source_ids, 0)
    size = footprint.block_size
    is_open = footprint.aligned and footprint.eviction_method.uneven and live % size != 0
    plan = plan_compaction(seq_id, table, keep, size, pool.num_free, open_stays=is_open)
    return source_ids, None if plan is None else pool.shrink(plan)


def _note(account: EvictionCounters, done: Pass[Id], footprint: Footprint) -> None:
    size, live, keep = footprint.block_size, done.num_tokens, done.keep
    account.num_evicted, account.dropped_since = done.shift, 0
    account.prompt_slots = (
        0 if done.eviction_method.uneven else footprint.kept_prompt(live, done.prompt_slots, keep)
    )
    account.last_computed = done.logical_len
    account.blocks_freed += done.blocks_freed
    account.blocks_perfect += blocks_for(live, size) - blocks_for(keep, size)
    account.compactions += 1
