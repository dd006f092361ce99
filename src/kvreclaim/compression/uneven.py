"""Unequal counts: how many tokens each (layer, KV head) keeps, rounded so that whole blocks come free.

A head keeps a whole number of blocks' worth of tokens, at least one, all heads together exactly `budget`
tokens on average. So every head's last block is full at the same moment, and a sequence holds budget / S
blocks after a pass: nothing is lost to rounding but that a head has a few tokens more or less than its policy
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.head_views import (
    HeadsQuestion,
    free_slots,
    view_of_head,
    view_of_layer,
    views_of_heads,
)
from kvreclaim.compression.policy import CompressionPolicy, CountsQuestion, LayerView
from kvreclaim.compression.select import NanCheck, refuse_nan
from kvreclaim.compression.wrapping import ranked, within
from kvreclaim.errors import InvalidArgumentError

Heads = list[list[Tensor]]
"""One tensor per layer and KV head."""


def round_to_blocks(
    counts: np.ndarray, block_size: int, protected: np.ndarray, most: np.ndarray, total: int
) -> np.ndarray:
    """Blocks that each head keeps: counts / S by largest remainder, with a fixed sum. Every head keeps those
    of its protected tokens, and at least one: a head that attends to nothing has no answer.

    Args:
        counts:    [L, K] float, tokens
        protected: [L, K] int, tokens that each head keeps, if it can
        most:      [L, K] int, blocks that each head can keep, at least one
        total:     the sum, from that of the blocks that heads must keep to that of most

    Returns: [L, K] int64, the nearest such numbers in the sum of squares.
    Ties: the lowest (layer, head) gains, the highest loses.
    """
    wanted = counts.ravel() / block_size
    room = most.ravel().astype(np.int64)
    least = np.minimum(np.maximum(1, -(-protected.ravel() // block_size)), room)
    assert least.sum() <= total <= room.sum(), f"{total} blocks, {least.sum()} to {room.sum()}"
    blocks = np.clip(np.floor(wanted).astype(np.int64), least, room)
    while (missing := total - int(blocks.sum())) != 0:
        step = 1 if missing > 0 else -1
        able = np.flatnonzero(blocks < room if step > 0 else blocks > least)[::step]
        blocks[able[np.argmax(step * (wanted[able] - blocks[able]))]] += step
    return blocks.reshape(counts.shape)


@dataclass(frozen=True, slots=True, eq=False)
class UnevenChoice:
    """kept[layer][head]: [n] int64 ascending slots, n a multiple of the block size. moved: tokens over all
    heads that rounding to blocks took from those that the policy gave them to, and gave to others."""

    kept: Heads
    moved: int


@torch.no_grad()
def choose_uneven(
    compressor: Compressor,
    questions: Sequence[HeadsQuestion],
    block_size: int,
    check: NanCheck = refuse_nan,
) -> list[UnevenChoice]:
    """The slots that each head of several sequences keeps, budget tokens on average over those of a sequence;
    budget must be a multiple of block_size. As if each were asked about alone.

    check: as for select: what becomes of a NaN; where it returns, NaN is the least of all scores

    Raises: InvalidArgumentError if the policy gives scores or counts of a wrong shape, NaN, or counts
        that are not `budget` on average.
    """
    assert compressor.budget % block_size == 0, f"{compressor.budget} tokens in blocks of {block_size}"
    firsts = [_first_free(compressor, question) for question in questions]
    scores = [_checked_scores(rows, check) for rows in _scores(compressor, questions, firsts)]
    return [
        select_heads(compressor, *each, block_size, check)
        for each in zip(questions, firsts, scores, strict=True)
    ]


def select_heads(
    compressor: Compressor,
    question: HeadsQuestion,
    first: int,
    scores: Heads,
    block_size: int,
    check: NanCheck,
) -> UnevenChoice:
    """From one sequence's scores to what stays of each head. first: the first slot that may go"""
    recent, tokens, policy = compressor.config.recent, question.tokens, compressor.policy
    free = [[row[free_slots(first, len(row), recent)] for row in rows] for rows in scores]
    protected = np.full(tokens.shape, first + recent)
    views = views_of_heads(compressor, question, first) if policy.reranks else []
    if spans := policy.protects(question.logical_len):
        free, protected = _set_apart(compressor, views, spans, free, protected)
    always = torch.from_numpy(protected).double()
    asked = CountsQuestion(free, always, compressor.budget, question.logical_len, compressor.stats)
    counts = _checked(compressor, policy.counts(asked), tokens)
    total = tokens.size * compressor.budget // block_size
    blocks = round_to_blocks(counts, block_size, protected, tokens // block_size, total)
    if views:
        scores = _checked_scores(_ranked(policy, views, scores, blocks * block_size), check)
    kept = _kept(compressor, question, scores, blocks * block_size)
    return UnevenChoice(kept, round(float(np.maximum(counts - blocks * block_size, 0).sum())))


def _set_apart(
    compressor: Compressor,
    views: list[list[LayerView]],
    spans: Sequence[tuple[int, int]],
    free: Heads,
    protected: np.ndarray,
) -> tuple[Heads, np.ndarray]:
    """The scores of each head that compete, and its tokens that do not: those of the spans stay in every
    head; of more than fit its budget the best."""
    others, counts = [], protected.copy()
    for layer, rows in enumerate(free):
        others.append(rows[:])
        for head, row in enumerate(rows):
            view = views[layer][head]
            named = within(view, spans)[0, view.candidates]
            most = compressor.budget - int(protected[layer, head])
            counts[layer, head] += (stay := min(int(named.sum()), most))
            best = row.masked_fill(~named, -torch.inf).topk(stay, sorted=False).indices
            others[-1][head] = row[torch.ones_like(named).index_fill_(0, best, False)]
    return others, counts


def _ranked(
    policy: CompressionPolicy, views: list[list[LayerView]], scores: Heads, keep: np.ndarray
) -> Heads:
    """The scores to select by within each head, which keeps so many tokens [L, K]."""
    return [
        [
            ranked(policy, replace(view, budget=int(keep[layer, head])), row[None])[0]
            for head, (view, row) in enumerate(zip(views[layer], rows, strict=True))
        ]
        for layer, rows in enumerate(scores)
    ]


def _checked_scores(scores: Heads, check: NanCheck) -> Heads:
    """The scores of one sequence. Raises: what check raises."""
    check(torch.cat([row for rows in scores for row in rows]).isnan().any())
    if check is refuse_nan:
        return scores
    return [
        [row.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf) for row in rows] for rows in scores
    ]


def _first_free(compressor: Compressor, question: HeadsQuestion) -> int:
    """The first slot of each head that may go. A protected prompt may not go where it fits, with all heads
    alike; else its tokens outrank others but may go."""
    config, prompts = compressor.config, question.prompt_slots
    if config.protect_prompt and (prompts == prompts.flat[0]).all():
        prompt = max(config.sinks, int(prompts.flat[0]))
        return prompt if prompt + config.recent <= compressor.budget else config.sinks
    return config.sinks


def _scores(compressor: Compressor, questions: Sequence[HeadsQuestion], firsts: Sequence[int]) -> list[Heads]:
    """[T] fp32 each: whole layers while all heads hold the same tokens, else head by head, each for all
    sequences at once; or all heads of all at once, if the policy can. firsts: the first slot that may go."""
    num_layers, num_heads = compressor.facts.num_layers, compressor.facts.layers[0].num_kv_heads
    found: list[Heads] = [[[] for _ in range(num_layers)] for _ in questions]
    together = compressor.policy.any_heads
    whole = [i for i, question in enumerate(questions) if question.first and not together]
    alone = [i for i in range(len(questions)) if i not in whole]
    for layer in range(num_layers if whole else 0):
        views = [view_of_layer(compressor, layer, questions[i], firsts[i]) for i in whole]
        for i, scores in zip(whole, compressor.score(views), strict=True):
            found[i][layer] = list(scores)
    signals = [lru_cache(1)(question.signals) for question in questions]
    places = [(i, n, h) for n in range(num_layers) for h in range(num_heads) for i in alone]
    step = len(places) if together else len(alone)
    for start in range(0, len(places), max(1, step)):
        some = places[start : start + step]
        views = [view_of_head(compressor, n, h, questions[i], firsts[i], signals[i](n)) for i, n, h in some]
        for (i, layer, _), scores in zip(some, compressor.score(views), strict=True):
            found[i][layer].append(scores[0])
    return found


def _checked(compressor: Compressor, counts: Tensor, tokens: np.ndarray) -> np.ndarray:
    """The policy's counts, [L, K] float64. Raises: InvalidArgumentError."""
    name, shape = compressor.policy.name, tokens.shape
    if tuple(counts.shape) != shape or not bool(counts.isfinite().all()):
        raise InvalidArgumentError(
            f"policy {name} counted {list(counts.shape)} tokens; it must give {list(shape)} finite numbers."
        )
    found = counts.double().cpu().numpy()
    if abs(found.mean() - compressor.budget) > 1 or (found < 0).any() or (found > tokens + 0.5).any():
        raise InvalidArgumentError(
            f"policy {name} counted {found.mean():.2f} tokens per head, from {found.min():.2f} to "
            f"{found.max():.2f}; they must be {compressor.budget} on average and no more than a head has."
        )
    return found


def _kept(compressor: Compressor, question: HeadsQuestion, scores: Heads, keep: np.ndarray) -> Heads:
    """The slots that stay, ascending, so many of each head [L, K].

    Protected tokens make a head's slots three runs: those before the rivals stay, and so do those from the
    recent ones on; the places left go to the best of the rivals between them.
    """
    config, tokens = compressor.config, question.tokens
    places = keep - config.sinks - config.recent
    last = tokens - config.recent
    start, end = np.full_like(tokens, config.sinks), last
    if config.protect_prompt:
        prompt = np.clip(question.prompt_slots, config.sinks, last)
        whole = prompt - config.sinks <= places
        start, end = np.where(whole, prompt, start), np.where(whole, last, prompt)
        places = np.where(whole, places - (prompt - config.sinks), places)
    slots = torch.arange(int(tokens.max()), device=scores[0][0].device)

    def of(layer: int, head: int) -> Tensor:
        begin, stop, recent = (int(x[layer, head]) for x in (start, end, last))
        rivals = scores[layer][head][None, begin:stop]
        best = compressor.select_top(rivals, int(places[layer, head]))[0] + begin
        return torch.cat([slots[:begin], best, slots[recent : int(tokens[layer, head])]])

    return [[of(layer, head) for head in range(len(rows))] for layer, rows in enumerate(scores)]


def prompt_left(kept: Heads, prompt_slots: np.ndarray) -> np.ndarray:
    """[L, K] how many kept slots of each head lie among its first prompt_slots [L, K]."""
    heads = [slots for rows in kept for slots in rows]
    ends = np.cumsum([len(slots) for slots in heads])
    limits = np.repeat(prompt_slots.ravel(), np.diff(ends, prepend=0))
    inside = np.cumsum(torch.cat(heads).cpu().numpy() < limits)
    return np.diff(np.append(0, inside)[ends], prepend=0).reshape(prompt_slots.shape)
