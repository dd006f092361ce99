"""What a compression asks of the memory, what it gets, and whether it may."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.pool import BlockPool


class ShrinkPlan(Protocol):
    """The new table of one sequence. Plain integers; whoever moves the bytes knows the rest."""

    @property
    def seq_id(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Slots in use afterwards (physical length)."""

    @property
    def targets(self) -> tuple[int | None, ...]:
        """The new table: a writable block of the sequence, or None for a fresh one."""

    @property
    def strip(self) -> tuple[int, ...]:
        """Targets whose index entry must go first, so that nobody hits what is being overwritten."""


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A shrink that happened.

    block_ids:    the new table
    fresh:        the blocks that replaced the plan's None, in order
    blocks_freed: blocks that went back to the pool, less the fresh ones; not positive when other
                  sequences still hold what was dropped
    """

    block_ids: tuple[int, ...]
    fresh: tuple[int, ...]
    blocks_freed: int


def check_plan(plan: ShrinkPlan, table: BlockTable, pool: BlockPool, block_size: int) -> None:
    """Raise AssertionError unless the plan can be carried out as a whole. Changes nothing."""
    seq_id, targets = plan.seq_id, plan.targets
    assert 0 <= plan.num_tokens <= table.physical_len, (
        f"sequence {seq_id}: {plan.num_tokens} slots planned, it has {table.physical_len}"
    )
    needed = blocks_for(plan.num_tokens, block_size)
    assert len(targets) == needed, (
        f"sequence {seq_id}: {len(targets)} targets for {plan.num_tokens} slots, {needed} needed"
    )
    own = [target for target in targets if target is not None]
    assert len(set(own)) == len(own), f"sequence {seq_id}: a target is named twice in {targets}"
    assert set(plan.strip) <= set(own), f"sequence {seq_id}: strip {plan.strip} is not all in {own}"
    held = set(table.block_ids)
    for block in own:
        assert block in held, f"sequence {seq_id}: target {block} is not its block"
        refs = pool.ref_count(block)
        assert refs == 1, f"sequence {seq_id}: target {block} has {refs} references, 1 allowed"
        assert block in plan.strip or block not in pool.index, (
            f"sequence {seq_id}: target {block} is indexed and not in strip {plan.strip}"
        )
    fresh = len(targets) - len(own)
    assert fresh <= pool.num_free, f"sequence {seq_id}: {fresh} fresh blocks wanted, {pool.num_free} free"
