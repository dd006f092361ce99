"""A mixture of experts: the choice of a router, and products with the weights of the chosen experts."""
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl

from kvreclaim.ops.triton.decoder_kernels import activated


@triton.jit
def _of_best_groups(choice, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, SIZE: tl.constexpr):
    """choice, -inf outside the TOP_GROUPS of GROUPS of SIZE experts that have the largest sums of their two
    largest numbers."""
    experts, places = tl.arange(0, choice.shape[0]), tl.arange(0, 64)
    sums = tl.full([64], float("-inf"), tl.float32)
    for i in range(GROUPS):
        own = tl.where(experts // SIZE == i, choice, float("-inf"))
        rest = tl.where(experts == tl.argmax(own, axis=0), float("-inf"), own)
        sums = tl.where(places == i, tl.max(own, axis=0) + tl.max(rest, axis=0), sums)
    is_kept = experts < 0
    for _ in range(TOP_GROUPS):
        best = tl.argmax(sums, axis=0)
        sums = tl.where(places == best, float("-inf"), sums)
        is_kept = is_kept | (experts // SIZE == best)
    return tl.where(is_kept, choice, float("-inf"))


@triton.jit
def route_kernel(
    logits,
    shift,
    scores,
    ids,
    E: tl.constexpr,
    TOP: tl.constexpr,
    SUMS_TO_ONE: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
):
    """scores and ids [T, TOP]: the largest numbers of the softmax of logits [T, E], in falling order.
    IS_SIGMOID: of their sigmoids; those with the largest sums with shift [E], in the best groups.
    SUMS_TO_ONE: over their sum."""
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK_TOP)
    made = tl.load(logits + token * E + experts, mask=experts < E, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        made = 1.0 / (1.0 + tl.exp(tl.minimum(-made, 88.0)))
        left = made + tl.load(shift + experts, mask=experts < E, other=float("-inf"))
    else:
        made = tl.exp(made - tl.max(made, axis=0))
        made = made / tl.sum(made, axis=0)
        left = made
    if GROUPS > 1:
        left = _of_best_groups(left, GROUPS, TOP_GROUPS, E // GROUPS)
    found = tl.full([BLOCK_TOP], 0, tl.float32)
    for i in range(TOP):
        best = tl.argmax(left, axis=0)
        tl.store(ids + token * TOP + i, best)
        found = tl.where(places == i, tl.sum(tl.where(experts == best, made, 0.0), axis=0), found)
        left = tl.where(experts == best, float("-inf"), left)
    if SUMS_TO_ONE:
        found = found / tl.sum(found, axis=0)
    tl.store(scores + token * TOP + places, found * SCALE, mask=places < TOP)


@triton.jit(do_not_specialize=["T"])
def expert_kernel(
    x,
    ids,
    scores,
    weight,
    shared,
    bias,
    y,
    T,
    N: tl.constexpr,
    K: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP: tl.constexpr,
    SHARED: tl.constexpr,
    IS_FIRST: tl.constexpr,
    GELU: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_TOP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y: for each of a token's experts ids [T, TOP], and SHARED more that all tokens have. Program (e, n, t)
    computes the columns n of expert e for those of the tokens t that have it.
    IS_FIRST: y [T, TOP + SHARED, N], gate and up of x [T, K], weight [E, 2 N, K], bias [E, 2 N]; else
    y [TOP + SHARED, T, N], products of x [T, TOP + SHARED, K], weight [E, N, K], bias [E, N], times scores
    [T, TOP] or one.
    shared: [2 SHARED N, K], gates before ups, or [N, SHARED K], without a bias.
    IS_TRANSPOSED: weight [E, K, 2 N] or [E, K, N]; IS_INTERLEAVED: columns of gate and up in turns, not one
    half each. LIMIT above 0 is a ClampedGate's."""
    WIDTH: tl.constexpr = 2 * BLOCK_N if IS_FIRST else BLOCK_N
    COLUMNS: tl.constexpr = 2 * N if IS_FIRST else N
    ALL: tl.constexpr = TOP + SHARED
    expert = tl.program_id(0)
    piece = expert - EXPERTS
    tokens = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    places = tl.arange(0, BLOCK_TOP)
    mask = (tokens < T)[:, None] & (places < TOP)[None, :]
    own = tl.load(ids + tokens[:, None] * TOP + places[None, :], mask=mask, other=-1).to(tl.int32) == expert
    if SHARED > 0:
        own = own | ((tokens < T)[:, None] & (piece >= 0) & (places == TOP + piece)[None, :])
    is_here = tl.max(own.to(tl.int32), axis=1) > 0
    if tl.max(is_here.to(tl.int32), axis=0) > 0:
        place = tl.sum(tl.where(own, places[None, :], 0), axis=1)
        row = tokens * ALL + place
        column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        is_column = column < COLUMNS
        half, stride = N, K
        start = weight + expert.to(tl.int64) * COLUMNS * K
        if SHARED > 0:
            if piece >= 0:
                start = shared + piece * K * (N if IS_FIRST else 1)
            half = tl.where(piece >= 0, SHARED * N, N)
            if not IS_FIRST:
                stride = tl.where(piece >= 0, SHARED * K, K)
        if IS_FIRST and not IS_INTERLEAVED:
            column = column // 2 + column % 2 * half
        start += column[None, :] * (1 if IS_TRANSPOSED else stride)
        rows = x + (tokens if IS_FIRST else row)[:, None] * K
        total = tl.full([BLOCK_T, WIDTH], 0, tl.float32)
        for first in range(0, K, BLOCK_K):
            k = first + tl.arange(0, BLOCK_K)
            numbers = tl.load(rows + k[None, :], mask=is_here[:, None] & (k < K)[None, :], other=0.0).to(
                DTYPE
            )
            inside = is_column[None, :] & (k < K)[:, None]
            w = tl.load(start + k[:, None] * (COLUMNS if IS_TRANSPOSED else 1), mask=inside, other=0.0)
            total += tl.dot(numbers, w.to(DTYPE), input_precision=PRECISION)
        if HAS_BIAS:
            total += tl.load(bias + expert * COLUMNS + column, mask=is_column, other=0.0).to(tl.float32)[
                None, :
            ]
        if IS_FIRST:
            gate, up = tl.split(tl.reshape(total, [BLOCK_T, BLOCK_N, 2]))
            if LIMIT > 0:
                gate, up = tl.minimum(gate, LIMIT), tl.clamp(up, -LIMIT, LIMIT) + 1.0
            total = activated(gate, GELU, ALPHA) * up
        else:
            is_routed = is_here & (place < TOP)
            given = tl.load(scores + tokens * TOP + place, mask=is_routed, other=1.0 if SHARED > 0 else 0.0)
            total *= given.to(tl.float32)[:, None]
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        target = row if IS_FIRST else place * T + tokens
        tl.store(y + target[:, None] * N + n[None, :], total, mask=is_here[:, None] & (n < N)[None, :])
