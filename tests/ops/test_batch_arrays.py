"""The batch as tensors says what its sequences say."""

from __future__ import annotations

import numpy as np
import torch

from kvreclaim.ops.batch import AttentionBatch, SequenceSlots

CPU = torch.device("cpu")


def ids(*blocks: int) -> np.ndarray:
    return np.array(blocks, dtype=np.int32)


def test_arrays_of_a_mixed_batch() -> None:
    rows = (SequenceSlots(ids(4, 2), 1, 20, shift=7), SequenceSlots(ids(9), 3, 3), SequenceSlots(ids(), 0, 0))
    arrays = AttentionBatch.build(rows, 16, CPU).arrays
    assert arrays.block_table.tolist() == [[4, 2], [9, 0], [0, 0]]
    assert arrays.query_starts.tolist() == [0, 1, 4, 4]
    assert arrays.seq_lens.tolist() == [20, 3, 0]
    assert arrays.shifts.tolist() == [7, 0, 0]
    assert (arrays.max_query_len, arrays.max_seq_len) == (3, 20)
    assert {x.dtype for x in (arrays.block_table, arrays.query_starts, arrays.seq_lens)} == {torch.int32}


def test_slots_of_decodes_and_of_chunks_agree() -> None:
    big = 2**31 // 16 - 1
    one = AttentionBatch.build((SequenceSlots(ids(3, big), 1, 18),), 16, CPU)
    two = AttentionBatch.build((SequenceSlots(ids(3, big), 2, 18),), 16, CPU)
    assert one.slot_mapping.tolist() == [big * 16 + 1]
    assert two.slot_mapping.tolist() == [big * 16, big * 16 + 1]
    assert one.slot_mapping.dtype == two.slot_mapping.dtype == torch.int64


def test_a_memo_is_made_once() -> None:
    batch = AttentionBatch.build((SequenceSlots(ids(1), 1, 1),), 16, CPU)
    made: list[AttentionBatch] = []
    for _ in range(2):
        assert batch.cached("x", lambda b: made.append(b) or len(made)) == 1
    assert made == [batch]
