"""Where survivors may go, against the rules one by one."""

from __future__ import annotations

import dataclasses
import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.memory import CompactionPlan, TableState
from kvreclaim.memory.windows import Window
from kvreclaim.schedule.budget.compaction import plan_compaction
from kvreclaim.schedule.budget.drops import beyond, joined
from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint, excess_slots, longest_sequence
from kvreclaim.schedule.budget.sparse import SparseRows
from kvreclaim.schedule.sequence import ScheduledSequence

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


def tokens(spans):
    return {token for start, end in spans for token in range(start, end)}


@pytest.mark.parametrize("most", [1, 3, 12])
def test_spans_are_sets(most):
    """Joined spans ascend and lie apart, and so does what is left of them outside of others."""
    rng = random.Random(most)

    def some():
        starts = (rng.randrange(40) for _ in range(rng.randrange(most + 1)))
        return [(start, start + rng.randrange(9)) for start in starts]

    for _ in range(400):
        one, other = some(), some()
        spans, others = joined(one), joined(other)
        assert tokens(spans) == tokens(one)
        assert all(before[1] < after[0] for before, after in itertools.pairwise(spans))
        left = beyond(spans, others)
        assert tokens(left) == tokens(spans) - tokens(others)
        assert joined(left) == left


PLAIN = Footprint(block_size=4, max_chunk=8)
BOUNDED = Footprint(EvictionMethod.COMPACT, budget=12, interval=6, block_size=4, max_chunk=8)
PROMPT_ONLY = Footprint(EvictionMethod.COMPACT, budget=12, prompt_only=True, block_size=4, max_chunk=8)
WINDOWED = Footprint(block_size=4, max_chunk=8, windows=(Window(6, 2),))
TRAILING = Footprint(block_size=4, max_chunk=8, trailing=Window(6))


@pytest.mark.parametrize("footprint", [PLAIN, BOUNDED, PROMPT_ONLY, WINDOWED, TRAILING])
@pytest.mark.parametrize("num_blocks", [4, 5, 9, 30])
def test_it_is_the_last_length_that_fits(footprint: Footprint, num_blocks: int) -> None:
    limit = 70
    for prompt in (None, 1, 9, 15):
        fits = [
            length
            for length in range(1, limit + 1)
            if excess_slots(prompt or length, length, footprint, num_blocks) <= 0
        ]
        assert longest_sequence(prompt, limit, footprint, num_blocks) == max(fits, default=0)


@pytest.mark.parametrize("footprint", [PLAIN, BOUNDED, PROMPT_ONLY, WINDOWED, TRAILING])
@pytest.mark.parametrize("num_blocks", [4, 5, 9, 30])
def test_no_prompt_makes_it_less_than_what_holds_for_all(footprint: Footprint, num_blocks: int) -> None:
    limit = 70
    for_all = longest_sequence(None, limit, footprint, num_blocks)
    each = [longest_sequence(prompt, limit, footprint, num_blocks) for prompt in range(1, limit)]
    assert min(each[: max(0, for_all - 1)], default=for_all) >= for_all


SPARSE = SparseRows(tile=4, span=8, first=10, last=5)


def test_rows_lie_between_multiples_of_the_span():
    assert SPARSE.rows(60) == range(16, 48)
    assert SPARSE.rows(61) == range(16, 56)
    assert SPARSE.rows(20) == range(16, 16)
    assert SPARSE.rows(20, compress_prompt_at=27) == range(16, 24)


@st.composite
def footprints(draw) -> Footprint:
    span = draw(st.sampled_from((4, 8, 12)))
    sparse = SparseRows(4, span, draw(st.integers(0, 20)), draw(st.integers(1, 20)))
    if draw(st.booleans()):
        return Footprint(sparse=sparse, max_chunk=draw(st.integers(12, 40)))
    budget, interval = draw(st.integers(4, 30)), draw(st.integers(1, 10))
    return Footprint(
        EvictionMethod.COMPACT, budget, interval, sparse=sparse, max_chunk=draw(st.integers(12, 40))
    )


@given(footprints(), st.integers(1, 150), st.data())
def test_every_chunk_ends_at_a_multiple_or_at_a_point_of_the_sequences_own(footprint, num_prompt, data):
    """Steps may leave any room, as long as a span fits into one; so the chunks between such points are
    the same."""
    seq = ScheduledSequence(0, "r", [0] * (num_prompt + 3), num_prompt, 200, footprint=footprint)
    rows = footprint.sparse_rows(num_prompt)
    for _ in range(1000):
        if not seq.num_uncomputed:
            break
        most = data.draw(st.integers(footprint.sparse.span, 40))
        own = footprint._until_pass(seq.num_computed, num_prompt, seq.account)
        own = seq.num_computed + own if footprint.eviction_method.evicts else -1
        was_exact = seq.is_exact
        seq.num_computed += (chunk := seq.chunk_of(data.draw(st.integers(1, most)), most))
        assert 0 < chunk <= most
        end = seq.num_computed
        if rows.start < end < rows.stop:
            assert end % footprint.sparse.span == 0 or end == own
        assert was_exact == (end <= rows.stop), "no chunk is exact in part"
        if seq.is_due:
            gone = seq.num_computed - seq.account.num_evicted - footprint.budget
            seq.account.num_evicted += gone
            seq.account.last_computed = seq.num_computed
    assert not seq.num_uncomputed


@given(footprints(), st.integers(0, 200))
def test_a_hit_ends_where_a_chunk_may(footprint, num_tokens):
    end, sparse = footprint.hit_end(num_tokens), footprint.sparse
    assert end <= num_tokens
    assert end == num_tokens or num_tokens - end < sparse.span
    assert end <= sparse.start or end % sparse.span == 0
    assert footprint.hit_end(end) == end


@given(footprints(), st.integers(1, 150), st.integers(0, 40))
def test_what_others_find_ends_where_tokens_are_no_longer_computed_as_theirs(footprint, num_prompt, more):
    known, rows = num_prompt + more, footprint.sparse_rows(num_prompt)
    assert footprint.hit_limit(num_prompt, known) <= max(rows.stop, 0)
    assert footprint.exact_until(num_prompt, known) <= max(rows.stop, 0)
