"""Drops spans of a prompt from the cache before a later token of it is computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

import torch
from torch import Tensor

from kvreclaim.checks import check_int, is_int, require
from kvreclaim.compression.policy import Signal
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.feature import RequestDraft, RequestFeature
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.request import Sequence as Seq
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.step.engine import Engine
from kvreclaim.ops.cell_tables import head_lengths
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.refusals import Feature
from kvreclaim.schedule.budget.drops import Drop, Drops, joined


@torch.inference_mode()
def follow_drop(context: PassContext, seq: Seq, done: Drop) -> None:
    """Update positions and signals of a sequence after its table has dropped entries."""
    size, device, compressor = context.cache.block_size, context.cache.device, seq.request.compressor
    seq.cell_cache = None
    stays = torch.ones(done.num_tokens, dtype=torch.bool)
    for entry in done.entries:
        stays[entry * size : (entry + 1) * size] = False
    kept = stays.nonzero()[:, 0].to(device)
    needs_positions = compressor is not None and Signal.POSITIONS in compressor.policy.needs
    if compressor is not None and compressor.eviction_method.uneven:
        if needs_positions:
            _follow_heads(context, seq, stays, done.num_tokens)
    elif needs_positions or any(layer.softmax.window is not None for layer in context.facts.layers):
        seq.state.slot_positions = context.signals.positions(seq, done.num_tokens)[..., kept]
    context.signals.compacted(seq, kept[None, None])


def _follow_heads(context: PassContext, seq: Seq, stays: Tensor, num_tokens: int) -> None:
    """Update positions by head. Tokens since the last pass, which include the dropped ones, are shared."""
    state, cache, end = seq.state, context.cache, seq.num_computed
    lengths = head_lengths(state.cells, num_tokens, cache)
    before = state.head_positions
    if before is None:
        before = HeadRows.empty(lengths.shape, torch.int32, cache.device)
    new = lengths - before.counts
    num_new = int(new.max())
    positions = torch.arange(end - num_new, end, dtype=torch.int32)[stays[num_tokens - num_new :]]
    counts = new - num_new + len(positions)
    state.head_positions = before.append(positions.to(cache.device), len(positions) - counts, counts)


@dataclass(frozen=True, slots=True)
class DroppedSpans:
    """Spans to drop.

    drop_spans: (first, last + 1) of prompt tokens to drop from the cache
    drop_at:    drop them before the token at this position is computed; None: before the prompt's last one
    """

    drop_spans: Sequence[tuple[int, int]] | None = None
    drop_at: int | None = None


class SpanDrops(RequestFeature):
    """Frees whole blocks within the spans."""

    option = DroppedSpans
    prompt_keys: ClassVar = {"drop_spans": object, "drop_at": object}
    usage: ClassVar = {"dropped_tokens": attrgetter("num_dropped_tokens")}
    measured: ClassVar = {"drop_spans": (None, (), [])}

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        option = spec.option(DroppedSpans)
        assert option is not None, "the feature is on"
        has_spans = bool(_spans(option))
        return {
            Feature.DROPS: has_spans,
            Feature.NO_DROPS: not has_spans,
            Feature.DROP_AT: None if option.drop_at is None else repr(option.drop_at),
        }

    def claim(self, draft: RequestDraft) -> None:
        option = draft.spec.option(DroppedSpans)
        assert option is not None, "the feature is on"
        drops = checked(option, len(draft.spec.prompt_token_ids))
        if drops is not None:
            draft.footprint = draft.footprint.dropping(drops)

    def before_pass(self, seq: Seq) -> None:
        if seq.footprint.drops is None or (done := self._engine.scheduler.drop(seq)) is None:
            return
        totals = self._engine.totals
        totals.tokens_evicted += len(done.entries) * self._engine.memory.block_size
        totals.blocks_perfect += len(done.entries)
        self.follow(seq, done)

    def follow(self, seq: Seq, done: Drop) -> None:
        """Positions and signals follow the table."""
        follow_drop(self._engine.compression.context, seq, done)

    def report(self, request: Request, metrics: RequestMetrics) -> None:
        numbers = [seq.account.num_dropped for seq in request.sequences]
        if request.beams is not None:
            numbers.append(request.beams.spent.num_dropped)
        metrics.num_dropped_tokens = max(numbers, default=0)


def checked(option: DroppedSpans, num_prompt: int) -> Drops | None:
    """Return the spans to drop, merged; None: none are given. Raises: InvalidArgumentError."""
    spans, at = _spans(option), option.drop_at
    if not spans:
        return None
    if at is None:
        at = num_prompt - 1
    else:
        check_int("drop_at", at, 1)
    require(
        at < num_prompt,
        f"drop_at is {at}, but the prompt has {num_prompt} tokens; lower it, so that at least one token "
        "follows.",
        "drop_at",
    )
    for span in spans:
        is_pair = isinstance(span, (list, tuple)) and len(span) == 2 and all(map(is_int, span))
        require(
            is_pair and 0 <= span[0] < span[1] <= at,
            f"drop_spans has {span!r}; a span is (first, last + 1) of prompt tokens before drop_at, {at}; "
            "correct or remove it.",
            "drop_spans",
        )
    return Drops(joined(spans), at)


def _spans(option: DroppedSpans) -> Sequence[tuple[int, int]]:
    """The spans as given, or none. Raises: InvalidArgumentError."""
    spans = () if option.drop_spans is None else option.drop_spans
    require(
        isinstance(spans, (list, tuple)),
        f"drop_spans is {spans!r}; pass a list of (first, last + 1) of prompt tokens.",
        "drop_spans",
    )
    return spans
