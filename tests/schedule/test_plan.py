"""Where survivors may go, against the rules one by one."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.memory import CompactionPlan, TableState
from kvreclaim.schedule.budget.compaction import plan_compaction

SIZE = 4


@st.composite
def tables(draw):
    length = draw(st.integers(1, 8))
    ids = draw(st.lists(st.integers(0, 99), min_size=length, max_size=length, unique=True))
    refs = draw(st.lists(st.integers(1, 3), min_size=length, max_size=length))
    indexed = draw(st.lists(st.booleans(), min_size=length, max_size=length))
    return TableState(ids, refs, indexed), draw(st.integers(0, length * SIZE)), draw(st.integers(0, 8))


def kinds(table):
    rows = list(zip(table.block_ids, table.ref_counts, table.indexed, strict=True))
    writable = [block for block, refs, indexed in rows if refs == 1 and not indexed]
    strippable = [block for block, refs, indexed in rows if refs == 1 and indexed]
    return writable, strippable


@given(tables())
def test_the_rules(case):
    table, num_tokens, num_free = case
    writable, strippable = kinds(table)
    needed = -(-num_tokens // SIZE)
    missing = max(0, needed - len(writable))
    plan = plan_compaction(5, table, num_tokens, SIZE, num_free)
    if plan is None:
        assert missing > num_free + len(strippable)
        return
    own = [target for target in plan.targets if target is not None]
    fresh = len(plan.targets) - len(own)
    assert (plan.seq_id, plan.num_tokens, len(plan.targets)) == (5, num_tokens, needed)
    assert len(set(own)) == len(own)
    assert set(own) <= set(writable) | set(plan.strip)
    assert own == [block for block in table.block_ids if block in own]
    assert set(plan.strip) == set(own) & set(strippable)
    assert fresh <= num_free
    if missing <= num_free:
        assert (plan.strip, fresh) == ((), missing)
        assert own == writable[: needed - missing]
    else:
        assert list(plan.strip) == strippable[len(strippable) - len(plan.strip) :]
        assert len(plan.strip) == min(missing, len(strippable))


@given(tables())
def test_it_is_postponed_only_if_no_choice_of_blocks_would_do(case):
    table, num_tokens, num_free = case
    writable, strippable = kinds(table)
    own = writable + strippable
    needed = -(-num_tokens // SIZE)
    possible = needed - len(own) <= num_free
    assert (plan_compaction(0, table, num_tokens, SIZE, num_free) is not None) == possible


def plan(refs, indexed, num_tokens, num_free):
    table = TableState(list(range(10, 10 + len(refs))), refs, [bool(x) for x in indexed])
    return plan_compaction(1, table, num_tokens, SIZE, num_free)


def test_stripping_begins_at_the_tail_and_fresh_blocks_fill_the_rest():
    assert plan([2, 1, 1, 1], [1, 1, 1, 0], 8, 0) == CompactionPlan(1, 8, (12, 13), (12,))
    assert plan([2, 1, 1, 1], [1, 1, 1, 0], 16, 1) == CompactionPlan(1, 16, (None, 11, 12, 13), (11, 12))


def test_our_own_mistakes_are_asserted():
    with pytest.raises(AssertionError, match="holes"):
        plan_compaction(1, TableState([1, None], [1, 0], [False, False]), 4, SIZE, 0)
    with pytest.raises(AssertionError, match="9 tokens, 2 blocks"):
        plan([1, 1], [0, 0], 9, 0)


@given(tables())
def test_an_open_block_stays_the_last_one(case):
    """The others are planned as if it were not there."""
    table, num_tokens, num_free = case
    num_tokens -= num_tokens % SIZE
    closed = plan_compaction(5, table, num_tokens, SIZE, num_free)
    longer = TableState([*table.block_ids, 100], [*table.ref_counts, 1], [*table.indexed, False])
    plan = plan_compaction(5, longer, num_tokens + 1, SIZE, num_free, open_stays=True)
    if closed is None:
        assert plan is None
    else:
        assert plan == dataclasses.replace(closed, num_tokens=num_tokens + 1, targets=(*closed.targets, 100))
