"""Unequal counts: how many tokens each (layer, KV head) keeps, rounded so that whole blocks come free.

A head keeps a whole number of blocks' worth of tokens, all heads together exactly `budget` tokens on
average. So every head's last block is full at the same moment, and a sequence holds budget / S blocks after a
pass: nothing is lost to rounding but that a head has a few tokens more or less than its policy counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor, SignalSource
from kvreclaim.compression.policy import LayerView, Mode
from kvreclaim.compression.select import select
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.key_source import KeySource

HeadSource = Callable[[int, int | None], KeySource]
Heads = list[list[Tensor]]
"""One tensor per layer and KV head."""


def round_to_blocks(
    counts: np.ndarray, block_size: int, least: int, most: np.ndarray, total: int
) -> np.ndarray:
    """Blocks that each head keeps: counts / S by largest remainder, with a fixed sum.

    Args:
        counts: [L, K] float, tokens
        least:  blocks that every head keeps; most: [L, K] int, blocks that it can keep, >= least
        total:  the sum, from the sum of least to that of most

    Returns: [L, K] int64, the nearest such numbers in the sum of squares.
    Ties: the lowest (layer, head) gains, the highest loses.
    """
    assert least * most.size <= total <= most.sum(), f"{total} blocks, {least * most.size} to {most.sum()}"
    wanted = counts.ravel() / block_size
    room = most.ravel().astype(np.int64)
    blocks = np.clip(np.floor(wanted).astype(np.int64), least, room)
    while (missing := total - int(blocks.sum())) != 0:
        step = 1 if missing > 0 else -1
        able = np.flatnonzero(blocks < room if step > 0 else blocks > least)[::step]
        blocks[able[np.argmax(step * (wanted[able] - blocks[able]))]] += step
    return blocks.reshape(counts.shape)


@dataclass(frozen=True, slots=True, eq=False)
class HeadLengths:
    """What a pass over uneven heads starts from.

    tokens:       [L, K] int64, live tokens of each head
    prompt_slots: [L, K] int64, how many of them, from the first on, are of the prompt
    logical_len:  position of the next query
    first:        nothing has been evicted yet: all heads hold the same tokens
    """

    tokens: np.ndarray
    prompt_slots: np.ndarray
    logical_len: int
    first: bool


@dataclass(frozen=True, slots=True, eq=False)
class UnevenChoice:
    """kept[layer][head]: [n] int64 ascending slots, n a multiple of the block size. moved: tokens over all
    heads that rounding to blocks took from those that the policy gave them to, and gave to others."""

    kept: Heads
    moved: int


@torch.no_grad()
def choose_uneven(
    compressor: Compressor,
    source: HeadSource,
    lengths: HeadLengths,
    block_size: int,
    signals: SignalSource,
) -> UnevenChoice:
    """The slots that each head keeps, budget tokens on average; budget must be a multiple of block_size.

    Args:
        source:  (layer, head) -> one head's keys and values, or (layer, None) -> all heads', asked only at
                 the first pass
        signals: layer -> what the policy's needs name besides statistics, of all heads

    Raises: InvalidArgumentError if the policy gives scores or counts of a wrong shape, NaN, or counts
        that are not `budget` on average.
    """
    starts, protected = _protection(compressor, lengths)
    ends = np.maximum(starts, lengths.tokens - compressor.config.recent)
    scores = _scores(compressor, source, lengths, (starts, ends), signals)
    free = [
        [row[starts[layer, head] : ends[layer, head]] for head, row in enumerate(rows)]
        for layer, rows in enumerate(scores)
    ]
    counts = _checked(compressor, compressor.policy.counts(free, protected, compressor.budget), lengths)
    total = lengths.tokens.size * compressor.budget // block_size
    least = blocks_for(protected, block_size)
    blocks = round_to_blocks(counts, block_size, least, lengths.tokens // block_size, total)
    kept = [list(rows) for rows in scores]
    for layer, head in np.ndindex(blocks.shape):
        prompt_slots, num_kept = int(lengths.prompt_slots[layer, head]), int(blocks[layer, head]) * block_size
        kept[layer][head] = _keep(compressor, scores[layer][head], prompt_slots, num_kept)
    return UnevenChoice(kept, round(float(np.maximum(counts - blocks * block_size, 0).sum())))


def _protection(compressor: Compressor, lengths: HeadLengths) -> tuple[np.ndarray, int]:
    """[L, K] the first slot that may go, and how many of a head's tokens may not. A protected prompt may not
    go where it fits, with all heads alike; else its tokens outrank others but may go."""
    config = compressor.config
    first = config.sinks
    if config.protect_prompt and (lengths.prompt_slots == lengths.prompt_slots.flat[0]).all():
        prompt = max(first, int(lengths.prompt_slots.flat[0]))
        first = prompt if prompt + config.recent <= compressor.budget else first
    return np.full_like(lengths.tokens, first), first + config.recent


def _scores(
    compressor: Compressor,
    source: HeadSource,
    lengths: HeadLengths,
    free: tuple[np.ndarray, np.ndarray],
    signals: SignalSource,
) -> Heads:
    """[T] fp32 each: whole layers while all heads hold the same tokens, else head by head.

    free: [L, K] first and end of the slots that may go
    """
    scores: Heads = []
    for layer, facts in enumerate(compressor.facts.layers):
        spans = [slice(int(first), int(end)) for first, end in zip(*(x[layer] for x in free), strict=True)]
        whole = LayerView(
            layer,
            source(layer, None if lengths.first else 0),
            lengths.logical_len,
            facts,
            compressor.stats_of(layer),
            spans[0],
            signals=signals(layer),
            first=lengths.first,
            budget=compressor.budget,
        )
        if lengths.first:
            scores.append(list(compressor.score([whole])[0]))
            continue
        alone = [head_view(whole, head, source(layer, head), span) for head, span in enumerate(spans)]
        scores.append([compressor.score([view])[0][0] for view in alone])
    return scores


def _checked(compressor: Compressor, counts: Tensor, lengths: HeadLengths) -> np.ndarray:
    """The policy's counts, [L, K] float64. Raises: InvalidArgumentError."""
    name, shape = compressor.policy.name, lengths.tokens.shape
    if tuple(counts.shape) != shape or not bool(counts.isfinite().all()):
        raise InvalidArgumentError(
            f"policy {name} counted {list(counts.shape)} tokens; it must give {list(shape)} finite numbers."
        )
    found = counts.double().cpu().numpy()
    if abs(found.mean() - compressor.budget) > 1 or (found < 0).any() or (found > lengths.tokens + 0.5).any():
        raise InvalidArgumentError(
            f"policy {name} counted {found.mean():.2f} tokens per head, from {found.min():.2f} to "
            f"{found.max():.2f}; they must be {compressor.budget} on average and no more than a head has."
        )
    return found


def _keep(compressor: Compressor, scores: Tensor, prompt_slots: int, num_kept: int) -> Tensor:
    """[num_kept] ascending slots of one head."""
    tiers = compressor.tiers(scores.shape[0], prompt_slots)
    rows = scores[None, None]
    return select(rows, num_kept, tiers, Mode.PER_LAYER_HEAD, compressor.select_top)[0, 0]


def head_view(view: LayerView, head: int, source: KeySource, candidates: slice) -> LayerView:
    """A view of one KV head and its query heads; what it holds of all heads is sliced, not copied.

    source: of this head, K = 1
    """
    facts, stats, signals = view.facts, view.stats, view.signals
    heads = facts.num_kv_heads
    own_signals = {
        field.name: tensor.unflatten(0, (heads, -1))[head]
        for field in fields(signals)
        if isinstance(tensor := getattr(signals, field.name), Tensor)
    }
    softmax, sinks = facts.softmax, facts.softmax.sinks
    if sinks is not None:
        softmax = replace(softmax, sinks=sinks.unflatten(0, (heads, -1))[head])
    return replace(
        view,
        source=source,
        facts=replace(facts, num_heads=facts.group_size, num_kv_heads=1, softmax=softmax),
        stats=None if stats is None else stats.kv_head(head, heads),
        candidates=candidates,
        signals=replace(signals, **own_signals),
        first_head=head,
    )
