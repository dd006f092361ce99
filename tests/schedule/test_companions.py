"""Companions as integers: what they hold of the pool, and which gives way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreclaim.memory import MemoryManager
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.companions import Companions
from kvreclaim.schedule.sequence import ScheduledSequence

SIZE = 4
FOOTPRINT = Footprint(EvictionMethod.COMPACT, budget=8, interval=8, block_size=SIZE, max_chunk=16)


def sequence(seq_id: int, num_tokens: int = 12, max_len: int = 64) -> ScheduledSequence:
    return ScheduledSequence(
        seq_id, f"r{seq_id}", list(range(num_tokens)), num_tokens, max_len, footprint=FOOTPRINT
    )


def companions(num_blocks: int = 20) -> Companions[ScheduledSequence]:
    return Companions(MemoryManager(num_blocks, SIZE))


def begun(
    held: Companions[ScheduledSequence], target: ScheduledSequence, seq_id: int, num_tokens: int = 0
) -> ScheduledSequence:
    """A companion that holds so many tokens."""
    companion = sequence(seq_id, len(target.token_ids))
    held.begin(target, companion)
    if num_tokens:
        written(held, companion, num_tokens)
    return companion


def written(held: Companions[ScheduledSequence], companion: ScheduledSequence, num_tokens: int) -> None:
    assert held.grow(companion, num_tokens) is not None
    held.memory.release_copy_sources()
    held.commit(companion, num_tokens)
    held.memory.check()


def test_what_it_writes_is_no_other_sequences_hit():
    held, target = companions(), sequence(0)
    companion = begun(held, target, 10, 12)
    assert companion.num_computed == 12
    assert held.memory.num_free == 17
    match = held.memory.match_prefix(held.memory.keys(list(target.token_ids)))
    assert match.num_tokens == 0
    held.leave(0)
    assert held.memory.stats().cached == 0


def test_a_fork_shares_blocks_lengths_and_what_was_evicted():
    held, target, child = companions(), sequence(0), sequence(1)
    companion = begun(held, target, 10, 12)
    companion.account.num_evicted, companion.account.blocks_freed = 3, 2
    branch = sequence(11)
    held.fork(child, branch, companion)
    assert held.memory.table(11).block_ids == held.memory.table(10).block_ids
    assert held.memory.num_free == 17
    assert (branch.num_computed, branch.account.num_evicted, branch.account.blocks_freed) == (12, 3, 0)
    assert held.get(child) is branch
    held.leave(0)
    assert held.memory.num_free == 17
    held.leave(1)
    assert held.memory.num_free == 20
    held.memory.check()


def test_a_fork_of_an_exact_owner_shares_its_hits_and_adds_none():
    held, target = companions(), sequence(0)
    memory = held.memory
    target.keys = memory.keys(target.token_ids)
    memory.admit(0, memory.match_prefix(target.keys))
    memory.grow(0, 12)
    memory.release_copy_sources()
    memory.commit(0, 12)
    target.num_computed = 12
    companion = sequence(10)
    held.fork(target, companion, target)
    assert memory.table(10).block_ids == memory.table(0).block_ids
    companion.token_ids += range(50, 58)
    written(held, companion, 8)
    assert memory.match_prefix(memory.keys([*range(12), *range(50, 59)])).num_tokens == 12
    held.leave(0)
    assert (memory.stats().cached, memory.num_free) == (0, 17)
    memory.check()


def test_a_pass_leaves_the_budget_and_gives_room_for_drafts_back_first():
    held, target = companions(), sequence(0)
    companion = begun(held, target, 10, 16)
    assert companion.is_due
    held.grow(companion, 9)
    assert held.memory.num_free == 20 - blocks_for(25, SIZE)
    done = held.compress(companion)
    assert done is not None
    assert (done.num_tokens, done.keep, done.logical_len, len(done.source_ids)) == (16, 8, 16, 4)
    assert done.blocks_freed == 2
    assert (companion.account.num_evicted, companion.account.compactions) == (8, 1)
    table = held.memory.table(10)
    assert (table.physical_len, table.logical_len, len(table.block_ids)) == (8, 16, 2)
    assert held.memory.num_free == 18
    assert not companion.is_due


@pytest.mark.parametrize("others", [0, 1, 3])
def test_room_for_the_first_pass_for_drafts_and_for_everybodys_next_token(others):
    target = sequence(99, num_tokens=12)
    # 12 tokens are below the 16 at which it is compressed; 4 drafts more; a block for each one's next token
    needed = blocks_for(16 + 4, SIZE) + others + 1
    for spare, answer in ((0, True), (-1, False)):
        held = companions(others + needed + spare)
        for i in range(others):
            begun(held, sequence(i), 10 + i, 1)
        assert held.has_room(target, FOOTPRINT, 4) is answer


def test_no_more_room_is_reserved_than_its_owner_will_ever_be_long():
    held, target = companions(), sequence(0, num_tokens=5, max_len=6)
    held = companions(blocks_for(6 + 1, SIZE) + 1)
    assert held.has_room(target, FOOTPRINT, 1)


STEPS = st.lists(
    st.tuples(st.sampled_from(["begin", "fork", "grow", "draft", "way", "leave"]), st.integers(0, 3)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(STEPS, st.integers(4, 24))
def test_any_order_leaves_the_pool_as_a_shadow_counts_it(steps, num_blocks):
    """The shadow: by target, in order, its companion's logical and live tokens."""
    held, shadow, made = companions(num_blocks), {}, [100]
    targets = [sequence(i, 40) for i in range(4)]
    for operation, seq_id in steps:
        target, companion = targets[seq_id], held.get(targets[seq_id])
        if operation == "begin" and companion is None:
            made[0] += 1
            begun(held, target, made[0])
            shadow[seq_id] = [0, 0]
        elif operation == "fork" and companion is not None and held.get(targets[(seq_id + 1) % 4]) is None:
            made[0] += 1
            held.fork(targets[(seq_id + 1) % 4], sequence(made[0], 40), companion)
            shadow[(seq_id + 1) % 4] = list(shadow[seq_id])
        elif operation == "grow" and companion is not None:
            if held.grow(companion, 9) is not None:
                held.memory.release_copy_sources()
                held.commit(companion, 9)
                shadow[seq_id][0] += 9
                shadow[seq_id][1] += 9
            if companion.is_due and held.compress(companion) is not None:
                shadow[seq_id][1] = 8
        elif operation == "draft" and companion is not None:
            held.grow(companion, 5)
            held.memory.release_copy_sources()
        elif operation == "way" and held.evict_one():
            shadow.popitem()
        elif operation == "leave":
            assert (held.leave(seq_id) is not None) is (shadow.pop(seq_id, None) is not None)
        held.memory.check()
        assert {target.seq_id: _lengths(held, target) for target in targets if held.get(target)} == shadow
        rooms = {b for one in held for b in held.memory.table(one.seq_id).block_ids}
        assert held.memory.num_free == num_blocks - len(rooms)
    for seq_id in range(4):
        held.leave(seq_id)
    assert held.memory.stats().free == num_blocks


def _lengths(held: Companions[ScheduledSequence], target: ScheduledSequence) -> list[int]:
    companion = held.get(target)
    table = held.memory.table(companion.seq_id)
    assert table.logical_len == companion.num_computed
    assert companion.num_computed - companion.account.num_evicted == table.physical_len
    return [table.logical_len, table.physical_len]
