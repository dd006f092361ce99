"""Unequal counts: the tokens that each (layer, KV head) keeps, rounded so that whole blocks are freed.

A head keeps a whole number of blocks' worth of tokens, at least one, all heads together exactly `budget`
tokens on average. So every head's last block is full at the same moment, and a sequence holds budget / S
blocks after a pass. Rounding frees no fewer blocks; a head only has a few tokens more or less than its policy
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
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.head_views import (
    HeadsQuestion,
    free_slots,
    view_of_head,
    view_of_layers,
    views_of_heads,
)
from kvreclaim.compression.policy import CompressionPolicy, CountsQuestion, LayerView
from kvreclaim.compression.select import NanCheck, refuse_nan
from kvreclaim.compression.wrapping import ranked, within
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.head_rows import HeadRows, runs, spread
from kvreclaim.ops.moving import fetch


def round_to_blocks(
    counts: np.ndarray, block_size: int, protected: np.ndarray, most: np.ndarray, total: int
) -> np.ndarray:
    """Return the blocks that each head keeps: counts / S by largest remainder, with a fixed sum. Every head
    keeps the blocks of its protected tokens, and at least one: attention over no token is undefined.

    Args:
        counts:    [L, K] float, tokens
        protected: [L, K] int, tokens that each head keeps, if it can
        most:      [L, K] int, blocks that each head can keep, at least one
        total:     the sum, from that of the blocks that heads must keep to that of most

    Returns: [L, K] int64, the nearest such numbers in the sum of squares.
    Ties: the lowest (layer, head) gains, the highest loses.
    """
    exact = counts.ravel() / block_size
    room = most.ravel().astype(np.int64)
    least = np.minimum(np.maximum(1, -(-protected.ravel() // block_size)), room)
    assert least.sum() <= total <= room.sum(), f"{total} blocks, {least.sum()} to {room.sum()}"
    blocks = np.clip(np.floor(exact).astype(np.int64), least, room)
    while (missing := total - int(blocks.sum())) != 0:
        step = 1 if missing > 0 else -1
        able = np.flatnonzero(blocks < room if step > 0 else blocks > least)[::step]
        blocks[able[np.argmax(step * (exact[able] - blocks[able]))]] += step
    return blocks.reshape(counts.shape)


@dataclass(frozen=True, slots=True, eq=False)
class UnevenChoice:
    """Tokens that each head of a sequence keeps.

    kept:         ascending slots, int64; per head a multiple of the block size
    prompt_slots: [L, K] int64, kept slots among the question's prompt_slots; 0 without protect_prompt
    moved:        tokens that rounding to blocks has moved between heads
    """

    kept: HeadRows
    prompt_slots: np.ndarray
    moved: int


@torch.no_grad()
def choose_uneven(
    compressor: Compressor,
    questions: Sequence[HeadsQuestion],
    block_size: int,
    check: NanCheck = refuse_nan,
    most_blocks: int | None = None,
) -> list[UnevenChoice]:
    """Return the slots that each head of several sequences keeps, budget tokens on average over a sequence's
    heads. budget must be a multiple of block_size. Sequences do not affect each other's result.

    check: handles NaN scores, as in select, with a bool of each sequence; if it returns, NaN is the lowest
    most_blocks: blocks that a head keeps at most, no fewer than its budget's; None: no limit

    Raises: InvalidArgumentError if the policy gives scores or counts of a wrong shape, NaN, or counts
        that are not `budget` on average.
    """
    assert compressor.budget % block_size == 0, f"{compressor.budget} tokens in blocks of {block_size}"
    firsts = [_first_free(compressor, question) for question in questions]
    scores = _scores(compressor, questions, firsts)
    return select_heads(compressor, questions, firsts, scores, block_size, check, most_blocks)


def select_heads(
    compressor: Compressor,
    questions: Sequence[HeadsQuestion],
    firsts: Sequence[int],
    scores: Tensor,
    block_size: int,
    check: NanCheck,
    most_blocks: int | None,
) -> list[UnevenChoice]:
    """Select the tokens of each head from their scores. The host waits once, for the policy's counts of all
    sequences.

    firsts: first evictable slot of each sequence
    scores: fp32 of all tokens of all heads, sequence by sequence, as HeadRows.flat
    """
    rows = HeadRows(_numbers(scores), np.concatenate([question.tokens for question in questions]))
    layers = iter(rows)
    heads = [[next(layers) for _ in question.tokens] for question in questions]
    selections = [_Selection(compressor, *each) for each in zip(questions, firsts, heads, strict=True)]
    sizes = [int(question.tokens.sum()) for question in questions]
    is_nan, *counts = fetch([_hold_nan(scores.split(sizes)), *(each.counts for each in selections)])
    check(torch.from_numpy(is_nan).bool())
    keep = [
        each.rounded(found, block_size, most_blocks) for each, found in zip(selections, counts, strict=True)
    ]
    if compressor.policy.reranks:
        ranks = [each.ranks(own) for each, own in zip(selections, keep, strict=True)]
        check(_hold_nan(ranks))
        rows = HeadRows(_numbers(torch.cat(ranks)), rows.counts)
    kept = _kept(compressor, questions, rows, np.concatenate(keep))
    parts = kept.flat.split([int(own.sum()) for own in keep])
    left = [_prompt_left(compressor.config, *each) for each in zip(questions, keep, strict=True)]
    return [
        UnevenChoice(HeadRows(part, own), prompt, round(float(np.maximum(found - own, 0).sum())))
        for part, own, prompt, found in zip(parts, keep, left, counts, strict=True)
    ]


def _hold_nan(scores: Sequence[Tensor]) -> Tensor:
    return torch.stack([each.isnan().any() for each in scores])


class _Selection:
    """Selection of one sequence. scores: [T] per layer and head.

    protected: [L, K] int64, protected tokens of each head
    counts:    the policy's counts, [L, K] float, on the policy's device
    """

    def __init__(
        self, compressor: Compressor, question: HeadsQuestion, first: int, scores: list[list[Tensor]]
    ) -> None:
        self.compressor, self.question, self.scores = compressor, question, scores
        policy, tokens, recent = compressor.policy, question.tokens, compressor.config.recent
        free = [[row[free_slots(first, len(row), recent)] for row in rows] for rows in scores]
        self.protected = np.full(tokens.shape, first + recent)
        self.views = views_of_heads(compressor, question, first) if policy.reranks else []
        if spans := policy.protects(question.logical_len):
            free, self.protected = _set_apart(compressor, self.views, spans, free, self.protected)
        always = torch.from_numpy(self.protected.astype(np.float64))
        self.counts = policy.counts(
            CountsQuestion(free, always, compressor.budget, question.logical_len, compressor.stats)
        )
        if tuple(self.counts.shape) != tokens.shape:
            raise InvalidArgumentError(_wrong_counts(policy, self.counts.shape, tokens.shape))

    def rounded(self, counts: np.ndarray, block_size: int, most_blocks: int | None) -> np.ndarray:
        """Round the policy's counts [L, K] float64 to whole blocks. Raises: InvalidArgumentError."""
        compressor, tokens = self.compressor, self.question.tokens
        policy, budget = compressor.policy, compressor.budget
        if not np.isfinite(counts).all():
            raise InvalidArgumentError(_wrong_counts(policy, counts.shape, tokens.shape))
        mean, least, most = counts.mean(), counts.min(), counts.max()
        if abs(mean - budget) > 1 or least < 0 or (counts > tokens + 0.5).any():
            raise InvalidArgumentError(
                f"policy {policy.name} counted {mean:.2f} tokens per head, from {least:.2f} to {most:.2f}; "
                f"they must be {budget} on average and no more than a head has."
            )
        total = tokens.size * budget // block_size
        room = np.minimum(tokens // block_size, tokens.max() if most_blocks is None else most_blocks)
        return round_to_blocks(counts, block_size, self.protected, room, total) * block_size

    def ranks(self, keep: np.ndarray) -> Tensor:
        """Return reranked scores for selection within heads, as HeadRows.flat. keep: [L, K]"""
        policy = self.compressor.policy
        return torch.cat(
            [
                ranked(policy, replace(view, budget=count), row[None])[0]
                for views, rows, counts in zip(self.views, self.scores, keep.tolist(), strict=True)
                for view, row, count in zip(views, rows, counts, strict=True)
            ]
        )


def _wrong_counts(policy: CompressionPolicy, found: Sequence[int], expected: Sequence[int]) -> str:
    return f"policy {policy.name} counted {list(found)} tokens; it must give {list(expected)} finite numbers."


def _numbers(scores: Tensor) -> Tensor:
    """Replace NaN by the lowest score."""
    return scores.nan_to_num(-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def _set_apart(
    compressor: Compressor,
    views: list[list[LayerView]],
    spans: Sequence[tuple[int, int]],
    free: list[list[Tensor]],
    protected: np.ndarray,
) -> tuple[list[list[Tensor]], np.ndarray]:
    """Return each head's competing scores, and its number of protected tokens. Tokens of the spans stay in
    every head, the best of them if they exceed its budget."""
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


def _first_free(compressor: Compressor, question: HeadsQuestion) -> int:
    """Return the first evictable slot of each head. A protected prompt is not evictable if it fits the budget
    and all heads hold the same part of it; else its tokens outrank others."""
    config, prompts = compressor.config, question.prompt_slots
    if config.protect_prompt and (prompts == prompts.flat[0]).all():
        prompt = max(config.sinks, int(prompts.flat[0]))
        return prompt if prompt + config.recent <= compressor.budget else config.sinks
    return config.sinks


def _scores(compressor: Compressor, questions: Sequence[HeadsQuestion], firsts: Sequence[int]) -> Tensor:
    """Return fp32 scores, sequence by sequence as HeadRows.flat. Policies with any_heads
    score all heads at once, others stacks of layers while all heads hold the same tokens, else single heads.

    firsts: first evictable slot of each sequence
    """
    num_layers, num_heads = questions[0].tokens.shape
    found: list[dict[tuple[int, int], Tensor]] = [{} for _ in questions]
    together = compressor.policy.any_heads
    whole = [i for i, question in enumerate(questions) if question.first and not together]
    alone = [i for i in range(len(questions)) if i not in whole]
    longest = max((int(questions[i].tokens.max()) for i in whole), default=0)
    stacks = all(questions[i].stack is not None for i in whole)
    for layers in compressor.split(longest, stacks) if whole else ():
        views = [view_of_layers(compressor, layers, questions[i], firsts[i]) for i in whole]
        places = [(layer, head) for layer in layers for head in range(num_heads)]
        for i, scores in zip(whole, compressor.score(views), strict=True):
            found[i].update(zip(places, scores, strict=True))
    signals = [lru_cache(1)(question.signals) for question in questions]
    heads = [(i, n, h) for n in range(num_layers) for h in range(num_heads) for i in alone]
    step = len(heads) if together else len(alone)
    for start in range(0, len(heads), max(1, step)):
        some = heads[start : start + step]
        views = [view_of_head(compressor, n, h, questions[i], firsts[i], signals[i](n)) for i, n, h in some]
        for (i, *at), scores in zip(some, compressor.score(views), strict=True):
            found[i][at[0], at[1]] = scores[0]
    return torch.cat([own[at] for own in found for at in np.ndindex(num_layers, num_heads)])


def _kept(
    compressor: Compressor, questions: Sequence[HeadsQuestion], scores: HeadRows, keep: np.ndarray
) -> HeadRows:
    """Return the kept slots, ascending. keep: slots per head [N L, K] of N sequences.

    Protected tokens divide a head's slots into three runs. The first and the last run stay; the
    remaining places go to the highest scores of the run between them.
    """
    config, tokens, device = compressor.config, scores.counts, scores.flat.device
    places = keep - config.sinks - config.recent
    last = tokens - config.recent
    start, end = np.full_like(tokens, config.sinks), last
    if config.protect_prompt:
        prompts = np.concatenate([question.prompt_slots for question in questions])
        prompt = np.clip(prompts, config.sinks, last)
        whole = prompt - config.sinks <= places
        start, end = np.where(whole, prompt, start), np.where(whole, last, prompt)
        places = np.where(whole, places - (prompt - config.sinks), places)
    rows = scores.starts
    limits = ((rows + start).ravel(), (end - start).ravel(), places.ravel())
    best = compressor.backend.select_runs(scores.flat, *limits)
    pool = torch.cat([best, torch.arange(len(scores.flat), device=device)])
    first = places.cumsum().reshape(places.shape) - places
    lengths = np.stack([start, places, tokens - last], axis=-1)
    index = runs(np.stack([rows + len(best), first, rows + last + len(best)], axis=-1), lengths, device)
    return HeadRows(pool.index_select(0, index) - spread(rows, keep, device), keep)


def _prompt_left(config: CompressionConfig, question: HeadsQuestion, keep: np.ndarray) -> np.ndarray:
    """Count the kept slots of each head among its first prompt_slots [L, K]; returns [L, K]. Without
    protection nothing reads them: 0."""
    prompts = question.prompt_slots
    if not config.protect_prompt:
        return np.zeros_like(prompts)
    always = np.minimum(config.sinks, prompts) + np.maximum(0, prompts - question.tokens + config.recent)
    return always + np.minimum(prompts - always, keep - config.sinks - config.recent)
