"""Rows of blocks that are being filled: whose they are, and when they may be taken."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from kivi_walk import KIVI, Dims, Walk
from paged_oracle import under

from kvreclaim.ops import reference
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import CacheShape
from kvreclaim.ops.formats.open_blocks import NO_ROW, OpenBlocks

SMALL = Dims()


def rows_for(num_rows: int, num_blocks: int = 8) -> OpenBlocks:
    return OpenBlocks(CacheShape(2, num_blocks, 2, 4, 6, 10), num_rows, torch.device("cpu"))


def test_the_table_on_the_device_says_what_the_host_knows() -> None:
    rows = rows_for(3)
    rows.take([5, 2])
    rows.take([2, 7])
    assert rows.row_of.tolist() == [NO_ROW, NO_ROW, 1, NO_ROW, NO_ROW, 0, NO_ROW, 2]
    rows.keep([2, 6])
    assert rows.blocks == {2}
    assert rows.row_of.tolist() == [NO_ROW, NO_ROW, 1, *[NO_ROW] * 5]
    rows.drop([2, 3])
    assert not rows.blocks
    assert (rows.row_of == NO_ROW).all()


def test_rows_of_sealed_blocks_are_free_between_passes_only() -> None:
    rows = rows_for(2)
    rows.take([0, 1])
    rows.seal([0, 6])
    with pytest.raises(AssertionError, match="2 of 2 rows hold open blocks, and 1 more are needed"):
        rows.take([2])
    assert rows.take([2], between_passes=True) == [0]
    assert rows.blocks == {1, 2}


@pytest.mark.parametrize("again", [lambda rows: rows.take([0]), lambda rows: rows.keep([0, 1])])
def test_a_sealed_block_that_is_filled_again_keeps_its_row(again) -> None:
    """By a compaction that ends in it, or by a pass that is run once more."""
    rows = rows_for(2)
    rows.take([0, 1])
    rows.seal([0])
    again(rows)
    with pytest.raises(AssertionError, match="rows hold open blocks"):
        rows.take([2], between_passes=True)


def test_a_compaction_takes_the_row_of_a_block_that_its_sequence_has_sealed() -> None:
    """Two rows for one sequence: the block it has just sealed, the one it fills, and the new last one."""
    walk = Walk(reference, SMALL, max_seqs=1)
    name = walk.begin()
    walk.write({name: 3})
    walk.write({name: 4})
    walk.fork(name)  # so that no target is a source
    walk.compact(name, torch.tensor([[[0, 2, 3, 5, 6]]]))
    walk.check()


def test_one_slot_mapping_serves_all_layers_of_one_pass_alone() -> None:
    rows, slots = rows_for(2), torch.tensor([8, 9, 4])
    first = rows.writes(slots)
    assert rows.writes(slots) is first
    rows.keep([])
    assert rows.writes(slots) is not first
    assert rows.blocks == {1, 2}


def test_what_a_write_does_to_blocks() -> None:
    """Blocks of 4: one filled by this write alone, one ended, one begun, one gone on with."""
    rows = rows_for(4)
    rows.take([1, 3])
    slots = [9, 8, 10, 11, 6, 7, 13, 0, 1]
    plan = rows.writes(torch.tensor(slots))
    assert rows.blocks == {0, 1, 3}
    row_of = rows.row_of.tolist()
    assert plan.whole.tolist() == [[1, 0, 2, 3]]
    assert plan.sealed.tolist() == [2, 1]
    assert plan.ended.tolist() == [row_of[1]]
    assert plan.opened.tolist() == [0]
    found = {
        slots[token]: (row, offset)
        for token, row, offset in zip(
            *(x.tolist() for x in (plan.tokens, plan.rows, plan.offsets)), strict=True
        )
    }
    assert found == {slot: (row_of[slot // 4], slot % 4) for slot in (6, 7, 13, 0, 1)}


def test_numbers_that_another_request_left_reach_nobody() -> None:
    """A NaN behind a sequence's last token would pass through the mask, times a probability of zero."""
    dims = Dims(layers=1)
    like = torch.empty(0)
    cache = reference.allocate(dims.facts, 4, 4, like=like, kv_format=KIVI, open_rows=1)
    assert cache.open is not None
    bad = torch.full((2, 2, 6), torch.nan), torch.full((2, 2, 10), torch.nan)
    reference.write_kv(cache.layers[0], *bad, torch.tensor([4, 5]))
    k, v = torch.randn(1, 2, 6), torch.randn(1, 2, 10)
    batch = AttentionBatch.build(
        (SequenceSlots(np.array([1], dtype=np.int32), 1, 1),), 4, torch.device("cpu")
    )
    for reset in (lambda: None, lambda: cache.open.keep([])):
        reset()
        reference.write_kv(cache.layers[0], k, v, batch.slot_mapping)
        out = reference.paged_attention(torch.randn(1, 4, 6), under(cache, 0, scale=1.0), batch)
        want = v[0].bfloat16().float().repeat_interleave(2, 0)[None]
        torch.testing.assert_close(out, want, atol=1e-6, rtol=0)
        cache.open.k.fill_(torch.nan)
        cache.open.v.fill_(torch.nan)


def test_a_row_of_a_block_that_a_compaction_filled_is_free_between_passes() -> None:
    walk = Walk(reference, SMALL, max_seqs=1)
    name = walk.begin()
    walk.write({name: 7})
    first, last = walk.rows[name].blocks
    rows = walk.cache.open
    assert rows is not None
    assert rows.blocks == {last}
    sources, targets = torch.tensor([first, last]), torch.tensor([last])
    reference.compact(walk.cache, torch.tensor([[[1, 3, 4, 6]]]), sources, targets)
    assert len(rows.take([20, 21], between_passes=True)) == 2
    assert rows.blocks == {20, 21}


def test_a_row_holds_zeros_behind_the_survivors_of_a_compaction() -> None:
    walk = Walk(reference, SMALL)
    name = walk.begin()
    walk.write({name: 7})
    walk.compact(name, torch.tensor([[[0, 1, 3, 5, 6]]]))
    walk.check()
    rows, last = walk.cache.open, walk.rows[name].blocks[1]
    assert rows is not None
    row = int(rows.row_of[last])
    assert rows.k[row, :, :, 0].any()
    assert not rows.k[row, :, :, 1:].any()
    assert not rows.v[row, :, :, 1:].any()
