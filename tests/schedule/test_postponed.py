"""A pass inside a prompt that lacks blocks, because somebody else holds shared ones in a full pool."""

from __future__ import annotations

import pytest

from kvreclaim.memory import MemoryManager
from kvreclaim.schedule import Footprint, Scheduler, Sequence, StepDone, Way

SIZE, CHUNK = 8, 32


@pytest.mark.parametrize("num_blocks", [18, 24, 60])
def test_a_prompt_whose_pass_is_postponed_waits_instead_of_creeping(num_blocks):
    """It begins with a hit of blocks that a neighbour goes on holding; a pass may not write these."""
    memory = MemoryManager(num_blocks, SIZE)
    scheduler: Scheduler[Sequence] = Scheduler(
        memory, max_num_seqs=4, max_num_batched_tokens=CHUNK, by_priority=False
    )
    prompt = list(range(400))
    neighbour = Sequence(0, "neighbour", prompt[:104], 104, 130)
    footprint = Footprint(Way.COMPACT, budget=64, interval=8, block_size=SIZE, max_chunk=CHUNK)
    late = Sequence(1, "late", prompt, 400, 402, first_id=1, footprint=footprint)
    live = [neighbour, late]
    scheduler.add(neighbour)
    steps = postponed = creeping = 0
    while live:
        plan = scheduler.schedule()
        assert plan.rows, "somebody can always go on"
        rows = {row.seq_id: row for row in plan.rows}
        if 0 in rows and 1 in rows and late.is_due:
            creeping += 1
        drawn = {
            seq.seq_id: (7,)
            for seq in live
            if seq.seq_id in rows
            and rows[seq.seq_id].first + rows[seq.seq_id].num_tokens == len(seq.token_ids)
        }
        assert scheduler.done(plan, StepDone(tuple(rows), drawn)) == []
        for seq in [seq for seq in live if len(seq.token_ids) >= seq.max_len]:
            live.remove(seq)
            scheduler.remove(seq)
        scheduler.compress(live)
        memory.check()
        postponed = max(postponed, late.account.postponed)
        if neighbour.num_computed == 104:
            scheduler.add(late)
        steps += 1
        assert steps < 60, "a token a step takes 53 of them in the smallest pool, 101 in the next"
    assert creeping == 0
    assert memory.stats().in_use == 0
    assert (postponed > 0) == (num_blocks == 18)
