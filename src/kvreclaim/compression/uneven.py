"""Unequal counts: how many tokens each (layer, KV head) keeps, rounded so that whole blocks come free.

A head keeps a whole number of blocks' worth of tokens, at least one, all heads together exactly `budget`
tokens on average. So every head's last block is full at the same moment, and a sequence holds budget / S
blocks after a pass: nothing is lost to rounding but that a head has a few tokens more or less than its policy
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor, SignalSource
from kvreclaim.compression.policy import CountsQuestion, LayerSignals, LayerView
from kvreclaim.compression.select import NanCheck, refuse_nan
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.key_source import KeySource

HeadSource = Callable[[int, int | None], KeySource]
Heads = list[list[Tensor]]
"""One tensor per layer and KV head."""


def round_to_blocks(
    counts: np.ndarray, block_size: int, protected: int, most: np.ndarray, total: int
) -> np.ndarray:
    """Blocks that each head keeps: counts / S by largest remainder, with a fixed sum. Every head keeps those
    of its protected tokens, and at least one: a head that attends to nothing has no answer.

    Args:
        counts:    [L, K] float, tokens
        protected: tokens that every head keeps
        most:      [L, K] int, blocks that each head can keep, no fewer than it must
        total:     the sum, from that of the blocks that heads must keep to that of most

    Returns: [L, K] int64, the nearest such numbers in the sum of squares.
    Ties: the lowest (layer, head) gains, the highest loses.
    """
    least = max(1, blocks_for(protected, block_size))
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
class HeadsQuestion:
    """Asks what to keep of one sequence whose heads may be uneven.

    source:       (layer, head) -> one head's keys and values, or (layer, None) -> all heads', asked only at
                  the first pass
    signals:      layer -> what the policy's needs name besides statistics, of all heads
    tokens:       [L, K] int64, live tokens of each head
    prompt_slots: [L, K] int64, how many of them, from the first on, are of the prompt
    logical_len:  position of the next query
    first:        nothing has been evicted yet: all heads hold the same tokens
    own:          (layer, head) -> fields of LayerSignals, of its own tokens [1, T], that lie where these do
    """

    source: HeadSource
    signals: SignalSource
    tokens: np.ndarray
    prompt_slots: np.ndarray
    logical_len: int
    first: bool
    own: Callable[[int, int], Mapping[str, Tensor]] = lambda *_: {}


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
        select_heads(compressor, *each, block_size) for each in zip(questions, firsts, scores, strict=True)
    ]


def select_heads(
    compressor: Compressor, question: HeadsQuestion, first: int, scores: Heads, block_size: int
) -> UnevenChoice:
    """From one sequence's scores to what stays of each head. first: the first slot that may go"""
    recent, tokens = compressor.config.recent, question.tokens
    free = [[row[_free(first, len(row), recent)] for row in rows] for rows in scores]
    asked = CountsQuestion(free, first + recent, compressor.budget, question.logical_len, compressor.stats)
    counts = _checked(compressor, compressor.policy.counts(asked), tokens)
    total = tokens.size * compressor.budget // block_size
    blocks = round_to_blocks(counts, block_size, first + recent, tokens // block_size, total)
    kept = _kept(compressor, question, scores, blocks * block_size)
    return UnevenChoice(kept, round(float(np.maximum(counts - blocks * block_size, 0).sum())))


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


def _free(first: int, num_tokens: int, recent: int) -> slice:
    return slice(first, max(first, num_tokens - recent))


def _scores(compressor: Compressor, questions: Sequence[HeadsQuestion], firsts: Sequence[int]) -> list[Heads]:
    """[T] fp32 each: whole layers while all heads hold the same tokens, else head by head, each for all
    sequences at once; or all heads of all at once, if the policy can. firsts: the first slot that may go."""
    num_layers, num_heads = compressor.facts.num_layers, compressor.facts.layers[0].num_kv_heads
    found: list[Heads] = [[[] for _ in range(num_layers)] for _ in questions]
    together = compressor.policy.any_heads
    whole = [i for i, question in enumerate(questions) if question.first and not together]
    alone = [i for i in range(len(questions)) if i not in whole]
    for layer in range(num_layers if whole else 0):
        views = [_view(compressor, layer, questions[i], firsts[i]) for i in whole]
        for i, scores in zip(whole, compressor.score(views), strict=True):
            found[i][layer] = list(scores)
    signals = [lru_cache(1)(question.signals) for question in questions]
    places = [(i, n, h) for n in range(num_layers) for h in range(num_heads) for i in alone]
    step = len(places) if together else len(alone)
    for start in range(0, len(places), max(1, step)):
        some = places[start : start + step]
        views = [_head_view(compressor, n, h, questions[i], firsts[i], signals[i](n)) for i, n, h in some]
        for (i, layer, _), scores in zip(some, compressor.score(views), strict=True):
            found[i][layer].append(scores[0])
    return found


def _view(compressor: Compressor, layer: int, question: HeadsQuestion, first: int) -> LayerView:
    """The view of all heads of a layer."""
    return LayerView(
        layer,
        question.source(layer, None),
        question.logical_len,
        compressor.facts.layers[layer],
        compressor.stats_of(layer),
        _free(first, int(question.tokens[layer, 0]), compressor.config.recent),
        signals=question.signals(layer),
        first=question.first,
        budget=compressor.budget,
    )


def _head_view(
    compressor: Compressor, layer: int, head: int, question: HeadsQuestion, first: int, signals: LayerSignals
) -> LayerView:
    """The view of one head. signals: of all heads of the layer"""
    source = question.source(layer, head)
    known = head_signals(signals, head, compressor.facts.layers[layer].num_kv_heads)
    facts, stats = compressor.of_head(layer, head)
    return LayerView(
        layer,
        source,
        question.logical_len,
        facts,
        stats,
        _free(first, source.shape[1], compressor.config.recent),
        signals=replace(known, **question.own(layer, head)),
        first=question.first,
        budget=compressor.budget,
        first_head=head,
    )


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


def head_signals(signals: LayerSignals, head: int, num_kv_heads: int) -> LayerSignals:
    """The signals of one KV head and its query heads; sliced, not copied."""
    own = {
        field.name: tensor.unflatten(0, (num_kv_heads, -1))[head]
        for field in fields(signals)
        if isinstance(tensor := getattr(signals, field.name), Tensor)
    }
    return replace(signals, **own) if own else signals


def head_view(view: LayerView, head: int, source: KeySource, candidates: slice) -> LayerView:
    """A view of one KV head and its query heads.

    source: of this head, K = 1
    """
    heads = view.facts.num_kv_heads
    return replace(
        view,
        source=source,
        facts=view.facts.kv_head(head),
        stats=None if view.stats is None else view.stats.kv_head(head, heads),
        candidates=candidates,
        signals=head_signals(view.signals, head, heads),
        first_head=head,
    )
