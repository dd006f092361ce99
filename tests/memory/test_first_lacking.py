"""first_lacking against what it foretells: passes carried out in order, copies settled before."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from kvreclaim.memory import MemoryManager
from kvreclaim.schedule.budget.compaction import plan_compaction

SIZE = 2


@given(st.data())
def test_it_names_the_first_pass_that_would_lack_blocks(data):
    memory = MemoryManager(data.draw(st.integers(4, 24), label="blocks"), SIZE)
    for number in range(data.draw(st.integers(1, 6), label="sequences")):
        fork = number and data.draw(st.booleans(), label="fork")
        if fork:
            parent = data.draw(st.integers(0, number - 1), label="parent")
            tokens = memory.table(parent).keys
            memory.fork(parent, number, tokens.fork(list(range(100))))
            continue
        keys = memory.keys(list(range(100)), data.draw(st.sampled_from((None, "other")), label="salt"))
        most = data.draw(st.integers(0, 12), label="hit")
        memory.admit(number, memory.match_prefix(keys, max_tokens=most))
        _grow(memory, number, data.draw(st.integers(0, 14), label="tokens"))
        memory.release_copy_sources()
    for seq_id in list(memory._tables):  # copies that are not settled yet
        _grow(memory, seq_id, data.draw(st.integers(0, 3), label="more"))
    lengths = {seq_id: table.physical_len for seq_id, table in memory._tables.items()}
    order = data.draw(st.permutations([seq_id for seq_id, n in lengths.items() if n]), label="order")
    passes = [(seq_id, data.draw(st.integers(0, lengths[seq_id]), label="keep")) for seq_id in order]
    unsure = set(data.draw(st.lists(st.sampled_from(order)), label="unsure")) if order else set()
    come = [each for each in passes if each[0] not in unsure or data.draw(st.booleans(), label="comes")]
    foretold, surely = memory.first_lacking(iter(passes)), memory.first_lacking(iter(passes), unsure)
    memory.release_copy_sources()
    if unsure and surely is None:
        assert _carried_out(memory, come) is None
    else:
        assert foretold == _carried_out(memory, passes)


def _grow(memory, seq_id, num_tokens):
    num_tokens = min(num_tokens, 100 - memory.table(seq_id).logical_len)
    while not memory.can_grow(seq_id, num_tokens):
        num_tokens -= 1
    if num_tokens > 0:
        memory.grow(seq_id, num_tokens)
        memory.commit(seq_id, num_tokens)


def _carried_out(memory, passes):
    """Which one was the first to lack blocks."""
    for seq_id, keep in passes:
        plan = plan_compaction(seq_id, memory.table_state(seq_id), keep, SIZE, memory.num_free)
        if plan is None:
            return seq_id
        memory.shrink(plan)
        memory.check()
    return None
