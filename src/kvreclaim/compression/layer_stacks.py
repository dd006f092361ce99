"""Layers that a pass scores together, as one layer with the KV heads of all of them: a GPU then launches
what one layer takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from kvreclaim.compression.policy import LayerSignals
from kvreclaim.compression.stats import LayerStats
from kvreclaim.ops.facts import LayerFacts, ModelFacts, joined_softmax
from kvreclaim.ops.key_source import KeySource
from kvreclaim.ops.working_memory import working_bytes

Layers = tuple[int, ...]
StackSource = Callable[[Layers], KeySource]

MAX_BYTES = 1 << 28
"""Keys and values of a stack's layers in fp32, which some policies copy out of the cache; more on a GPU with
much free memory."""


class LayerStacks:
    """Layers in stacks: they have the same rotation, window and scale.

    layers: the model's layers that are scored
    """

    def __init__(self, model: ModelFacts, stats: Sequence[LayerStats] | None, layers: Sequence[int]) -> None:
        self._facts, self._stats, self._layers, self._device = model.layers, stats, layers, model.device
        self._made: dict[Layers, tuple[LayerFacts, LayerStats | None]] = {}
        self._joined: dict[Layers, LayerStats] = {}
        self._alike: dict[tuple[object, ...], list[int]] = {}
        for layer in layers:
            self._alike.setdefault(_kind(self._facts[layer]), []).append(layer)

    @cached_property
    def max_bytes(self) -> int:
        """Keys and values of a stack in fp32, by the memory that is free at the first pass."""
        return working_bytes(self._device, MAX_BYTES)

    def split(self, num_tokens: int, stacks: bool) -> Iterator[Layers]:
        """Yield the layers in stacks of at most max_bytes for sequences of so many tokens, or one by one."""
        if not stacks:
            yield from ((layer,) for layer in self._layers)
            return
        first = self._facts[0]
        of_layer = 4 * num_tokens * first.num_kv_heads * (first.head_dim + first.v_head_dim)
        most = self.max_bytes // of_layer
        width = 1 << max(0, most.bit_length() - 1)  # a power of two: few stacks are made
        for alike in self._alike.values():
            yield from (tuple(alike[i : i + width]) for i in range(0, len(alike), width))

    def of(self, layers: Layers) -> tuple[LayerFacts, LayerStats | None]:
        """Return the facts and statistics of a stack, made once."""
        if layers not in self._made:
            parts = [self._facts[layer] for layer in layers]
            heads = sum(part.num_heads for part in parts), sum(part.num_kv_heads for part in parts)
            softmax = joined_softmax([part.softmax for part in parts])
            facts = replace(parts[0], num_heads=heads[0], num_kv_heads=heads[1], softmax=softmax)
            self._made[layers] = facts, self._stats_of(layers)
        return self._made[layers]

    def _stats_of(self, layers: Layers) -> LayerStats | None:
        """Return a stack's statistics: views of those of all layers of its kind."""
        if self._stats is None or len(layers) == 1:
            return None if self._stats is None else self._stats[layers[0]]
        alike = tuple(next(each for each in self._alike.values() if layers[0] in each))
        if alike not in self._joined:
            self._joined[alike] = _joined_stats([self._stats[layer] for layer in alike])
        first = alike.index(layers[0])
        return _part(self._joined[alike], len(alike), slice(first, first + len(layers)))


def joined_signals(parts: Sequence[LayerSignals], num_kv_heads: int) -> LayerSignals:
    """Return the signals of stacked layers, which have the same ones."""
    if len(parts) == 1:
        return parts[0]
    found: dict[str, list[Tensor]] = {}
    for part in parts:
        for field in fields(part):
            if (tensor := getattr(part, field.name)) is not None:
                found.setdefault(field.name, []).append(tensor)
    if "positions" in found:
        found["positions"] = [own.expand(num_kv_heads, -1) for own in found["positions"]]
    return LayerSignals(**{name: torch.cat(rows) for name, rows in found.items()})


def _joined_stats(parts: Sequence[LayerStats]) -> LayerStats:
    """Join statistics of heads, layer by layer; no policy reads kvzap_in, which is of no head."""
    names = [name for name in parts[0].present() if name != "kvzap_in"]
    rows: dict[str, Any] = {name: torch.cat([getattr(own, name) for own in parts]) for name in names}
    return replace(parts[0], kvzap_in=None, **rows)


def _part(stats: LayerStats, num_layers: int, layers: slice) -> LayerStats:
    """Return views of some neighbours among num_layers joined layers."""
    rows: dict[str, Any] = {
        name: tensor.unflatten(0, (num_layers, -1))[layers].flatten(0, 1)
        for name, tensor in stats.present().items()
    }
    return replace(stats, **rows)


def _kind(facts: LayerFacts) -> tuple[object, ...]:
    """Return what layers of a stack have in common."""
    rope, softmax = facts.rope, facts.softmax
    limits = softmax.softcap, softmax.window, softmax.chunk
    return (rope and rope.key, softmax.scale, *limits, softmax.sinks is None)
