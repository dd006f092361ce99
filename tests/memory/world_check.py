"""Checks that a memory and its shadow agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvreclaim.memory import MISS_REASONS, MemoryStats, PrefixMatch, TableState
from kvreclaim.memory.blocks import INDEXED, PINNED

from .sequences import reuse_order

if TYPE_CHECKING:
    from .world import World


def check_world(world: World) -> None:
    shadow, pool = world.shadow, world.memory.pool
    world.memory.check()
    assert world.memory.stats() == _expected_stats(world)
    assert reuse_order(pool) == shadow.order
    assert {b: n for b, n in enumerate(pool.refs) if n} == shadow.refs
    assert {entry.block for entry in pool.index} == set(shadow.path_of_block)
    assert {b for b, mark in enumerate(pool.marks) if mark & INDEXED} == set(shadow.path_of_block)
    assert {b for b, mark in enumerate(pool.marks) if mark & PINNED} == shadow.pins.live()
    for seq_id in shadow.sequences:
        _check_sequence(world, seq_id)


def _check_sequence(world: World, seq_id: int) -> None:
    shadow, sequence, memory = world.shadow, world.shadow.sequences[seq_id], world.memory
    table = memory.table(seq_id)
    assert table.block_ids == sequence.blocks
    assert table.physical_len == len(sequence.contents)
    assert table.logical_len == sequence.logical_len
    assert table.exact == sequence.exact
    if world.predictable:
        assert memory.indexed_len(seq_id) == len(sequence.entries) * shadow.block_size
    refs = tuple(0 if block is None else shadow.refs[block] for block in sequence.blocks)
    indexed = tuple(block in shadow.path_of_block for block in sequence.blocks)
    assert memory.table_state(seq_id) == TableState(sequence.blocks, refs, indexed)
    for slot, content in enumerate(sequence.contents):
        assert shadow.stored(sequence, slot) == content, f"sequence {seq_id}: slot {slot} was overwritten"


def _expected_stats(world: World) -> MemoryStats:
    shadow = world.shadow
    cached = shadow.num_cached()
    assert shadow.hits + world.misses.total() == shadow.queries
    return MemoryStats(
        num_blocks=shadow.num_blocks,
        in_use=shadow.num_blocks - len(shadow.order),
        cached=cached,
        free=len(shadow.order) - cached,
        peak_in_use=shadow.peak,
        prefix_query_tokens=shadow.queries,
        prefix_hit_tokens=shadow.hits,
        prefix_evictions=shadow.evictions if world.predictable else world.memory.pool.num_evictions,
        blocks_freed_by_compression=shadow.freed,
        cow_copies=shadow.copies,
        pinned=len(shadow.pins.live()),
        pins_refused=shadow.pins.refused,
        misses={reason: world.misses[reason] for reason in MISS_REASONS},
    )


def count_misses(
    world: World, match: PrefixMatch, tokens: Sequence[int], salt: str | None, max_tokens: int | None
) -> None:
    """Check the reasons of misses: whole blocks have one reason and the tail has another."""
    size, limit = world.shadow.block_size, len(tokens) - 1
    left = range(match.num_tokens, limit - size + 1, size)
    if left and world.predictable:
        limit = limit if max_tokens is None else min(limit, max_tokens)
        assert match.miss in world.shadow.reasons(salt, tokens, match.num_tokens, limit)
    if left:
        world.misses[match.miss] += len(left) * size
    world.misses["sub_block"] += len(tokens) - match.num_tokens - len(left) * size
