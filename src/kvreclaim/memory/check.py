"""Invariants between any two operations, and preconditions of a shrink."""

from __future__ import annotations

from collections import Counter

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.changes import CompactionPlan
from kvreclaim.memory.pool import BlockPool


def check_plan(plan: CompactionPlan[int], table: BlockTable, pool: BlockPool, block_size: int) -> None:
    """Check that the plan can be applied as a whole. Changes nothing. Raises: AssertionError."""
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
        refs = pool.refs[block]
        assert refs == 1, f"sequence {seq_id}: target {block} has {refs} references, 1 allowed"
        assert block in plan.strip or block not in pool.index, (
            f"sequence {seq_id}: target {block} is indexed and not in strip {plan.strip}"
        )
    fresh = len(targets) - len(own)
    assert fresh <= pool.num_free, f"sequence {seq_id}: {fresh} fresh blocks wanted, {pool.num_free} free"


def check_counts(pool: BlockPool, held: Counter[int]) -> None:
    """Check every block's references against `held`. Raises: AssertionError with the numbers."""
    references = {block: refs for block, refs in enumerate(pool.refs) if refs}
    assert held.total() == sum(references.values()), (
        f"{held.total()} table entries, {sum(references.values())} references"
    )
    assert held == references, f"per block: {dict(held)} in the tables, {references} in the pool"


def check_table(seq_id: int, table: BlockTable, pool: BlockPool, block_size: int) -> None:
    """Check a table of full attention. Raises: AssertionError."""
    name, blocks = f"sequence {seq_id}", table.blocks()
    assert table.num_blocks == len(blocks), f"{name}: {len(blocks)} blocks held, {table.num_blocks} counted"
    assert len(set(blocks)) == len(blocks), f"{name}: a block occurs twice in {table.block_ids}"
    assert 0 <= table.exact_len <= table.physical_len <= table.logical_len, (
        f"{name}: exact {table.exact_len}, physical {table.physical_len}, logical {table.logical_len}"
    )
    room = len(table.block_ids) * block_size
    assert table.physical_len <= room, f"{name}: {table.physical_len} slots written, room for {room}"
    full, exact = table.physical_len // block_size, table.exact_len // block_size
    for index, block in enumerate(table.block_ids):
        assert block is not None or index < full, f"{name}: entry {index} of {full} full ones is a hole"
        assert block is None or block not in pool.index or index < exact, (
            f"{name}: entry {index} is indexed, only {exact} blocks were computed exactly"
        )
    _check_chain(name, table, block_size)


def _check_chain(name: str, table: BlockTable, block_size: int) -> None:
    if table.chain is None:
        return
    assert table.exact, f"{name}: still indexed after {table.num_evicted} tokens were evicted"
    full, known = table.physical_len // block_size, table.keys.num_tokens
    assert table.physical_len <= known, f"{name}: {table.physical_len} slots written of {known} known tokens"
    assert len(table.entries) == full, f"{name}: {len(table.entries)} entries for {full} full blocks"
    last = table.entries[-1] if full else None
    assert last is None or last is table.chain, f"{name}: its chain does not stand at its last entry"
