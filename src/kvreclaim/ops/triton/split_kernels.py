"""Shares of sequences for decoding: how many each gets, by its length, and which program serves which."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_units", "num_shares"])
def split_kernel(
    units, firsts, seq_ids, seq_lens, num_rows, num_units, num_shares,
    MIN_SPLIT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: writes plan.SequenceShares. A row gets its part of num_shares by its part of all tokens,
    rounded, but at least one share, and none of fewer than MIN_SPLIT tokens.

    So there are at most num_rows + num_shares shares; num_units is no less. Units behind the last share get
    0 shares of sequence 0.
    """
    places = tl.arange(0, BLOCK)
    sums = tl.full([BLOCK], 0, tl.int64)
    for first_row in range(0, num_rows, BLOCK):
        rows = first_row + places
        seqs = tl.load(seq_ids + rows, mask=rows < num_rows, other=0)
        sums += tl.load(seq_lens + seqs, mask=rows < num_rows, other=0).to(tl.int64)
    total = tl.maximum(tl.sum(sums, axis=0), 1)
    end = 0
    for first_row in range(0, num_rows, BLOCK):
        rows = first_row + places
        is_row = rows < num_rows
        seqs = tl.load(seq_ids + rows, mask=is_row, other=0)
        lengths = tl.load(seq_lens + seqs, mask=is_row, other=0).to(tl.int32)
        rounded = (2 * lengths.to(tl.int64) * num_shares + total) // (2 * total)
        counts = tl.minimum(rounded.to(tl.int32), tl.cdiv(lengths, MIN_SPLIT))
        counts = tl.where(is_row, tl.maximum(counts, 1), 0)
        starts = end + tl.cumsum(counts, axis=0) - counts
        tl.store(firsts + rows, starts, mask=is_row)
        for share in range(0, tl.max(counts, axis=0)):
            own = units + 3 * (starts + share)
            is_there = share < counts
            tl.store(own, seqs, mask=is_there)
            tl.store(own + 1, share, mask=is_there)
            tl.store(own + 2, counts, mask=is_there)
        end += tl.sum(counts, axis=0)
    tl.store(firsts + num_rows, end)
    for unit in range(end, num_units, BLOCK):
        own = units + 3 * (unit + places)
        is_there = unit + places < num_units
        tl.store(own, 0, mask=is_there)
        tl.store(own + 2, 0, mask=is_there)
