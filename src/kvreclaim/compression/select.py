"""Selection of kept slots from scores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.policy import Mode
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops import reference
from kvreclaim.ops.moving import fetch, to_device

NanCheck = Callable[[Tensor], None]

FREE, PROMPT, ALWAYS = 0, 1, 2
"""Tiers: tokens that may go, prompt tokens under protection, sinks and recent tokens."""


def refuse_nan(found: Tensor) -> None:
    """Raise InvalidArgumentError if a bool is true: waits for the device that computes it."""
    if bool(found.any()):
        raise InvalidArgumentError(
            "a score is NaN, so nothing can be ranked; check the policy, the statistics and the KV cache."
        )


def select(
    scores: Tensor,
    budget: int,
    tiers: np.ndarray,
    mode: Mode,
    select_top: Callable[[Tensor, int], Tensor] = reference.select_top,
    check: NanCheck | None = refuse_nan,
) -> Tensor:
    """Select equally many slots of every (layer, KV head).

    Args:
        scores: [L, K, T] float, higher = keep; -inf is allowed, NaN is not
        budget: tokens kept, >= 0
        tiers:  [T] int; a token of a higher tier always beats one of a lower tier (FREE, PROMPT, ALWAYS)
        mode:   heads that share a set: union takes the maximum over layers and heads, per_head the mean
                over layers, per_layer_head the scores as they are
        select_top: the op that selects the highest scores of each row (Backend.select_top)
        check:  called with a bool scalar on the scores' device that is true if a score is NaN. The default
                raises. A check that stores the scalar avoids a synchronisation here; NaN is then the lowest
                score. None: no check

    Returns: [L | 1, K | 1, min(budget, T)] int64 ascending, on the device of the scores. Ties: the
        lowest slot wins. Mutates nothing.
    Raises: InvalidArgumentError if a score is NaN, by default.
    """
    rows = _shared_scores(scores, mode)
    num_tokens = rows.shape[-1]
    assert tiers.shape == (num_tokens,), f"{tuple(tiers.shape)} tiers for {num_tokens} tokens"
    forced, rivals = _split_tiers(tiers, min(budget, num_tokens))
    places = min(budget, num_tokens) - len(forced)
    before, after, apart = _around(forced, rivals)
    flat = rows.flatten(0, 1)
    if check is not None:
        check(_holds_nan(flat))
    if check is not refuse_nan:
        flat = flat.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    if len(rivals) and rivals[-1] - rivals[0] == len(rivals) - 1:
        top = select_top(flat[:, rivals[0] : rivals[-1] + 1], places) + int(rivals[0])
    else:
        columns = to_device(rivals, rows.device)
        top = columns[select_top(flat[:, columns], places)]
    first, rest = (to_device(slots, rows.device).expand(len(flat), -1) for slots in (before, after))
    kept = torch.cat([first, top, rest], dim=-1)
    return (kept if apart else kept.sort(dim=-1).values).view(*rows.shape[:2], -1)


def select_each(
    scores: Sequence[Tensor],
    budget: int,
    tiers: np.ndarray,
    mode: Mode,
    select_top: Callable[[Tensor, int], Tensor] = reference.select_top,
) -> list[Tensor]:
    """Run select on several sequences [L, K, T] with the same T and tiers, in one batch of rows. NaN is the
    lowest score."""
    rows = [_shared_scores(each, mode) for each in scores]
    kept = select(torch.cat(rows), budget, tiers, Mode.PER_LAYER_HEAD, select_top, None)
    return list(kept.chunk(len(rows)))


def lowest_blocks(scores: Tensor, budget: int, tiers: np.ndarray, block_size: int) -> list[int]:
    """Select full blocks to free so that at most `budget` tokens are left, the same in all layers and heads.

    A block's score is the mean over layers, heads and its tokens that are not -inf. Its tier is the highest
    of its tokens. Lower tiers are freed first, the highest tier never; enough other blocks must exist.

    Args:
        scores: [L, K, T] float, higher = keep; -inf is allowed, NaN is not
        tiers:  [T] int, as for select

    Returns: ceil((T - budget) / S) indices, ascending. Ties: the lowest index stays. Mutates nothing.
    Raises: InvalidArgumentError if a score is NaN.
    Source: arXiv 2509.04377, which drops one block whenever a new one fills.
    """
    num_tokens = scores.shape[-1]
    assert tiers.shape == (num_tokens,), f"{tuple(tiers.shape)} tiers for {num_tokens} tokens"
    full = num_tokens // block_size
    num_evicted = blocks_for(num_tokens - budget, block_size)
    blocks = scores[..., : full * block_size].unflatten(-1, (full, block_size))
    seen = blocks > -torch.inf
    total = blocks.masked_fill(~seen, 0.0).sum(dim=(0, 1, 3), dtype=torch.float64)
    count = seen.sum(dim=(0, 1, 3))
    is_nan, found = fetch(
        [_holds_nan(scores.flatten(0, 1)), (total / count.clamp(min=1)).masked_fill(count == 0, -torch.inf)]
    )
    refuse_nan(torch.from_numpy(is_nan))
    means = found.tolist()
    highest = tiers[: full * block_size].reshape(full, block_size).max(axis=-1).tolist()
    order = sorted(range(full), key=lambda block: (highest[block], means[block], -block))
    droppable = sum(1 for tier in highest if tier < ALWAYS)
    assert num_evicted <= droppable, f"{num_evicted} of {full} blocks must go, {droppable} may"
    return sorted(order[:num_evicted])


def _holds_nan(rows: Tensor) -> Tensor:
    """Bool scalar on the device of the rows; a maximum is NaN if anything is."""
    return rows.amax(dim=-1).isnan().any() if rows.numel() else rows.isnan().any()


def _around(forced: np.ndarray, rivals: np.ndarray) -> tuple[np.ndarray, np.ndarray, bool]:
    """Count the forced slots before and after the rivals, and return whether none lies between rivals."""
    if not len(rivals):
        return forced, rivals, True
    cut = int(np.searchsorted(forced, rivals[0]))
    return forced[:cut], forced[cut:], not (forced[cut:] < rivals[-1]).any()


def _shared_scores(scores: Tensor, mode: Mode) -> Tensor:
    """[L, K, T] -> [L | 1, K | 1, T]."""
    if mode is Mode.UNION:
        return scores.amax(dim=(0, 1), keepdim=True)
    return scores.mean(dim=0, keepdim=True) if mode is Mode.PER_HEAD else scores


def _split_tiers(tiers: np.ndarray, places: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots that are kept regardless of their score, and the slots of one tier that compete for
    the remaining places: the highest tier that does not fit whole. Both ascending."""
    forced = np.empty(0, dtype=np.int64)
    for tier in np.unique(tiers)[::-1]:
        members = np.flatnonzero(tiers == tier)
        if len(forced) + len(members) > places:
            return forced, members
        forced = np.sort(np.concatenate([forced, members]))
    return forced, forced[:0]
