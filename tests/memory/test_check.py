"""check() is what the other tests lean on, so every kind of damage must make it fail."""

from __future__ import annotations

import pytest

from kvreclaim.memory import MemoryManager, Retention, eviction_orders
from kvreclaim.memory.blocks import INDEXED, PINNED

from .sequences import run, token_list


def lose_a_block(memory):
    memory.pool.free_queue.pop_front()


def count_a_reference_too_many(memory):
    memory.pool.refs[0] += 1


def shift_a_reference(memory):
    memory.pool.refs[0] += 1
    memory.pool.refs[1] -= 1


def queue_a_block_in_use(memory):
    memory.pool.free_queue.push_back(0)


def miscount_the_cached(memory):
    memory.pool.num_cached += 1


def forget_a_block_in_the_index(memory):
    del memory.pool.index._by_block[0]


def cross_two_entries(memory):
    blocks = memory.pool.index._by_block
    blocks[0], blocks[1] = blocks[1], blocks[0]


def table_with_a_block_twice(memory):
    memory.table(0).block_ids[1] = 0


def write_past_the_room(memory):
    memory.table(0).physical_len += 9
    memory.table(0).logical_len += 9


def more_physical_than_logical(memory):
    memory.table(0).physical_len += 1


def miscount_the_holes(memory):
    memory.table(0)._num_holes += 1


def a_hole_that_is_written_next(memory):
    memory.pool.release([memory.table(0).block_ids[2]])
    memory.table(0).block_ids[2] = None


def index_what_is_not_exact(memory):
    table = memory.table(0)
    table.mark_inexact()
    table._exact_len = 3


def lose_a_written_token(memory):
    token_list(memory.table(0).keys).pop()


def index_after_a_loss(memory):
    memory.table(0).exact = False
    memory.table(0)._exact_len = 10


def forget_an_entry(memory):
    memory.table(0).entries.pop()


def go_on_from_another_entry(memory):
    memory.table(0).chain = memory.table(0).entries[0]


def underestimate_the_peak(memory):
    memory.pool.peak_in_use = 0


def miscount_the_free(memory):
    memory.pool.num_free -= 1


def mark_what_is_not_indexed(memory):
    memory.pool.marks[7] = INDEXED


def unmark_what_is_indexed(memory):
    memory.pool.marks[0] = 0


def pin_without_a_time(memory):
    memory.pool.marks[0] |= PINNED


def pin_too_many(memory):
    memory.pin(0, [Retention(8, 60)])
    memory.pool.pins.limit = 1


def put_aside_what_is_in_use(memory):
    memory.pool.pins.aside[0] = 0


def miscount_the_first_blocks(memory):
    memory.pool.index._firsts.clear()


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_block,
        count_a_reference_too_many,
        shift_a_reference,
        queue_a_block_in_use,
        miscount_the_cached,
        forget_a_block_in_the_index,
        cross_two_entries,
        table_with_a_block_twice,
        write_past_the_room,
        more_physical_than_logical,
        miscount_the_holes,
        a_hole_that_is_written_next,
        index_what_is_not_exact,
        lose_a_written_token,
        index_after_a_loss,
        forget_an_entry,
        go_on_from_another_entry,
        underestimate_the_peak,
        miscount_the_free,
        mark_what_is_not_indexed,
        unmark_what_is_indexed,
        pin_without_a_time,
        pin_too_many,
        put_aside_what_is_in_use,
        miscount_the_first_blocks,
    ],
)
def test_damage_is_found(damage):
    memory = MemoryManager(8, 4)
    run(memory, 0, range(10))
    memory.check()
    damage(memory)
    with pytest.raises(AssertionError):
        memory.check()


@pytest.mark.parametrize("order", eviction_orders())
def test_damage_to_an_order_is_found(order):
    memory = MemoryManager(8, 4, eviction_policy=order)
    run(memory, 0, range(10))
    memory.free(0)
    memory.check()
    memory.pool.free_queue.pop()
    with pytest.raises(AssertionError):
        memory.check()
