"""Chunks and hits of prompts that are computed sparsely end where nothing that is decided together is cut."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.schedule.budget.eviction_method import EvictionMethod
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.budget.sparse import SparseRows
from kvreclaim.schedule.sequence import ScheduledSequence

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
    """Whatever room steps leave, as long as a span fits into one; and so the chunks between such points are
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
