"""Compression passes as values, with the positions of their survivors: block ids only, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import CompactionPlan, Id, TableState
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


@dataclass(frozen=True, slots=True)
class Pass(Generic[Id]):
    """One compression of one sequence. Lengths in tokens, per layer and KV head.

    source_ids:   blocks with the num_tokens live tokens, in table order
    target_ids:   blocks with the `keep` survivors afterwards; may overlap the sources, also those of a later
                  pass: passes run in order. For whole blocks, unknown until Scheduler.compressed
    logical_len:  tokens computed so far, evicted ones included: the position of the next query
    prompt_slots: leading live slots that hold prompt tokens (under CELLS: those since the last pass)
    first:        nothing of this sequence has been evicted yet
    blocks_freed: blocks returned to the pool, less those taken; as far as known beforehand
    """

    seq_id: Id
    eviction_method: EvictionMethod
    source_ids: tuple[int, ...]
    target_ids: tuple[int, ...]
    num_tokens: int
    keep: int
    logical_len: int
    prompt_slots: int
    first: bool
    blocks_freed: int = 0

    @property
    def shift(self) -> int:
        """Logical minus physical length after the pass."""
        return self.logical_len - self.keep


def plan_compaction(
    seq_id: Id,
    table: TableState,
    num_tokens: int,
    block_size: int,
    num_free: int,
    *,
    open_stays: bool = False,
) -> CompactionPlan[Id] | None:
    """Choose ceil(num_tokens / block_size) writable blocks.

    Own blocks that are unshared and not indexed come first, in table order. Missing ones are fresh if the
    pool has all of them; otherwise own indexed blocks are stripped, from the end of the table (the head of
    the chain stays hittable), and only the remainder is fresh.

    open_stays: the last block is not full, and stays last and unchanged

    Returns: the plan, with its targets in the order of the old table (a fresh block replaces the first block
    that could not be used); None if there are too few blocks.
    """
    blocks = [block for block in table.block_ids if block is not None]
    assert len(blocks) == len(table.block_ids), f"sequence {seq_id}: holes in its table {table.block_ids}"
    assert len(blocks) == len(table.ref_counts) == len(table.indexed), f"sequence {seq_id}: {table}"
    assert 0 <= num_tokens <= len(blocks) * block_size, f"{num_tokens} tokens, {len(blocks)} blocks"
    needed = blocks_for(num_tokens, block_size)
    assert not open_stays or (table.ref_counts[-1] == 1 and not table.indexed[-1]), f"{seq_id}: {table}"
    movable = len(blocks) - open_stays
    chosen = _choose(blocks[:movable], table, needed - open_stays, num_free)
    if chosen is None:
        return None
    targets, strip = chosen
    return CompactionPlan(seq_id, num_tokens, targets + tuple(blocks[movable:]), strip)


def _choose(
    blocks: list[int], table: TableState, needed: int, num_free: int
) -> tuple[tuple[int | None, ...], tuple[int, ...]] | None:
    """Return targets and blocks to strip, of the leading blocks of a table; None if there are too few."""
    private = [place for place in range(len(blocks)) if table.ref_counts[place] == 1]
    chosen = [place for place in private if not table.indexed[place]][:needed]
    strip: list[int] = []
    missing = needed - len(chosen)
    if missing > num_free:
        strippable = [place for place in private if table.indexed[place]]
        strip = strippable[max(0, len(strippable) - missing) :]
        missing -= len(strip)
        if missing > num_free:
            return None
    return _with_fresh(chosen + strip, missing, blocks), tuple(blocks[place] for place in strip)


def _with_fresh(own: list[int], missing: int, blocks: list[int]) -> tuple[int | None, ...]:
    """The blocks at the places `own` with `missing` fresh ones at the first places not among them."""
    used = set(own)
    fresh = [place for place in range(len(blocks)) if place not in used][:missing]
    return tuple(blocks[place] if place in used else None for place in sorted([*own, *fresh]))
