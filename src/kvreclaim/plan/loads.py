"""The model's work in a step of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvreclaim.memory.kv_memory import KVMemory
from kvreclaim.plan.cost import StepLoad
from kvreclaim.schedule import Row, ScheduledSequence


def load_of(rows: Iterable[Row], sequences: Mapping[int, ScheduledSequence], memory: KVMemory) -> StepLoad:
    """Between `schedule` and `done`: tables have the slots that were computed before."""
    num_tokens = num_seqs = keys = decodes = 0
    pairs = 0.0
    for row in rows:
        num_seqs += 1
        num_tokens += row.num_tokens
        held = memory.table(row.seq_id).physical_len
        if row.num_tokens == 1:
            keys += keys_read(sequences[row.seq_id], held + 1)
            decodes += 1
        else:
            pairs += row.num_tokens * (held + row.num_tokens / 2)
    return StepLoad(num_tokens, num_seqs, keys, pairs, decodes)


def keys_read(seq: ScheduledSequence, held: int) -> int:
    """By one query of a sequence that holds so many."""
    return min(held, seq.footprint.budget) if seq.reads_sparsely else held
