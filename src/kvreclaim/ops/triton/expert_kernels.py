"""A mixture of experts: the choice of a router, and products with the weights of the chosen experts."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.decoder_kernels import activated


@triton.jit
def route_kernel(
    logits,
    scores,
    ids,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """scores and ids [T, TOP]: the largest numbers of the softmax of logits [T, E], in falling order.
    SUMS_TO_ONE: over their sum."""
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK_TOP)
    left = tl.load(logits + token * E + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    left = tl.exp(left - tl.max(left, axis=0))
    left = left / tl.sum(left, axis=0)
    found = tl.full([BLOCK_TOP], 0, tl.float32)
    for i in range(TOP):
        best = tl.argmax(left, axis=0)
        tl.store(ids + token * TOP + i, best)
        found = tl.where(places == i, tl.max(left, axis=0), found)
        left = tl.where(experts == best, -1.0, left)
    if SUMS_TO_ONE:
        found = found / tl.sum(found, axis=0)
    tl.store(scores + token * TOP + places, found, mask=places < TOP)


@triton.jit(do_not_specialize=["T"])
def expert_kernel(
    x,
    ids,
    scores,
    weight,
    y,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP: tl.constexpr,
    IS_FIRST: tl.constexpr,
    GELU: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y [T, TOP, N]: for each of a token's experts ids [T, TOP]. Program (e, n, t) computes the columns n of
    expert e for those of the tokens t that have it.
    IS_FIRST: gate * up of x [T, K], weight [E, 2 N, K]; else products of x [T, TOP, K], weight [E, N, K],
    times scores [T, TOP]."""
    expert = tl.program_id(0)
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    places = tl.arange(0, BLOCK_TOP)
    mask = (tokens < T)[:, None] & (places < TOP)[None, :]
    own = tl.load(ids + tokens[:, None] * TOP + places[None, :], mask=mask, other=-1).to(tl.int32) == expert
    is_here = tl.max(own.to(tl.int32), axis=1) > 0
    if tl.max(is_here.to(tl.int32), axis=0) > 0:
        row = tokens * TOP + tl.sum(tl.where(own, places[None, :], 0), axis=1)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        start = weight + expert.to(tl.int64) * N * K * (2 if IS_FIRST else 1) + n[None, :] * K
        rows = x + (tokens if IS_FIRST else row)[:, None] * K
        total = tl.full([BLOCK_T, BLOCK_N], 0, tl.float32)
        up = tl.full([BLOCK_T, BLOCK_N], 0, tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            numbers = tl.load(rows + k[None, :], mask=is_here[:, None] & (k < K)[None, :], other=0.0).to(
                DTYPE
            )
            inside = (n < N)[None, :] & (k < K)[:, None]
            w = tl.load(start + k[:, None], mask=inside, other=0.0).to(DTYPE)
            total += tl.dot(numbers, w, input_precision=PRECISION)
            if IS_FIRST:
                w = tl.load(start + N * K + k[:, None], mask=inside, other=0.0).to(DTYPE)
                up += tl.dot(numbers, w, input_precision=PRECISION)
        if IS_FIRST:
            total = activated(total, GELU) * up
        else:
            total *= tl.load(scores + row, mask=is_here, other=0.0).to(tl.float32)[:, None]
        tl.store(y + row[:, None] * N + n[None, :], total, mask=is_here[:, None] & (n < N)[None, :])
