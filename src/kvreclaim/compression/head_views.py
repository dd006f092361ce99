"""Input of a compression pass over a sequence with uneven heads, and the views of its layers and heads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from torch import Tensor

from kvreclaim.compression.compressor import Compressor, SignalSource
from kvreclaim.compression.layer_stacks import Layers, StackSource, joined_signals
from kvreclaim.compression.policy import LayerSignals, LayerView
from kvreclaim.ops.key_source import KeySource

HeadSource = Callable[[int, int | None], KeySource]


@dataclass(frozen=True, slots=True, eq=False)
class HeadsQuestion:
    """Input of a compression pass over one sequence with uneven heads.

    source:       (layer, head) -> one head's keys and values, or (layer, None) -> all heads', called only
                  at the first pass
    signals:      layer -> the policy's signals of all heads, except statistics
    tokens:       [L, K] int64, live tokens of each head
    prompt_slots: [L, K] int64, leading ones that are prompt tokens
    logical_len:  position of the next query
    first:        True if nothing has been evicted yet: all heads hold the same tokens
    own:          (layer, head) -> fields of LayerSignals stored with the head's own tokens, [1, T]
    stack:        layers -> keys and values of all heads at the first pass, where that saves launches
    """

    source: HeadSource
    signals: SignalSource
    tokens: np.ndarray
    prompt_slots: np.ndarray
    logical_len: int
    first: bool
    own: Callable[[int, int], Mapping[str, Tensor]] = lambda *_: {}
    stack: StackSource | None = None


def free_slots(first: int, num_tokens: int, recent: int) -> slice:
    """Return the slots between the protected ones."""
    return slice(first, max(first, num_tokens - recent))


def view_of_layers(compressor: Compressor, layers: Layers, question: HeadsQuestion, first: int) -> LayerView:
    """Return the view of all heads of a stack of layers."""
    heads = question.tokens.shape[1]
    return LayerView(
        layers[0],
        question.source(layers[0], None) if question.stack is None else question.stack(layers),
        question.logical_len,
        *compressor.stacks.of(layers),
        free_slots(first, int(question.tokens[layers[0], 0]), compressor.config.recent),
        signals=joined_signals([question.signals(layer) for layer in layers], heads),
        first=question.first,
        budget=compressor.budget,
        num_layers=len(layers),
    )


def view_of_head(
    compressor: Compressor, layer: int, head: int, question: HeadsQuestion, first: int, signals: LayerSignals
) -> LayerView:
    """Return the view of one head. signals: of all heads of the layer"""
    source = question.source(layer, head)
    known = head_signals(signals, head, compressor.facts.layers[layer].num_kv_heads)
    facts, stats = compressor.of_head(layer, head)
    own = question.own(layer, head)
    return LayerView(
        layer,
        source,
        question.logical_len,
        facts,
        stats,
        free_slots(first, source.shape[1], compressor.config.recent),
        signals=replace(known, **own) if own else known,
        first=question.first,
        budget=compressor.budget,
        first_head=head,
    )


def views_of_heads(compressor: Compressor, question: HeadsQuestion, first: int) -> list[list[LayerView]]:
    """Return the views of all heads."""
    num_layers, num_heads = question.tokens.shape
    return [
        [view_of_head(compressor, layer, head, question, first, signals) for head in range(num_heads)]
        for layer in range(num_layers)
        for signals in [question.signals(layer)]
    ]


def head_signals(signals: LayerSignals, head: int, num_kv_heads: int) -> LayerSignals:
    """Slice the signals of one KV head and its query heads, without a copy."""
    own = {
        field.name: tensor.unflatten(0, (num_kv_heads, -1))[head]
        for field in fields(signals)
        if isinstance(tensor := getattr(signals, field.name), Tensor)
    }
    return replace(signals, **own) if own else signals


def head_view(view: LayerView, head: int, source: KeySource, candidates: slice) -> LayerView:
    """Return a view of one KV head and its query heads.

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
