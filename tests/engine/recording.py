"""Tiny policies that request signals and record the ones they get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvreclaim.compression import registry
from kvreclaim.compression.compressor import STATISTICS
from kvreclaim.compression.policy import (
    CompressionPolicy,
    CountsQuestion,
    LayerSignals,
    LayerView,
    Mode,
    Signal,
)
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

ONE_MORE_PASS = {Signal.FUTURE_QUERIES, Signal.READ_AGAIN}
NEEDS = {
    "queries": frozenset({Signal.RECENT_QUERIES}),
    "mass": frozenset({Signal.ATTENTION_MASS}),
    "positions": frozenset({Signal.POSITIONS}),
    "projection": frozenset({Signal.OUTPUT_PROJECTION}),
    "future": frozenset({Signal.FUTURE_QUERIES}),
    "again": frozenset({Signal.READ_AGAIN}),
    "observed": frozenset(Signal) - STATISTICS - ONE_MORE_PASS - {Signal.OUTPUT_PROJECTION},
    "all": frozenset(Signal) - STATISTICS - ONE_MORE_PASS,
}


@dataclass(frozen=True)
class Seen:
    """One view of one layer: its signals as copies, and what they belong to."""

    layer: int
    logical_len: int
    signals: LayerSignals
    keys: Tensor


def copied(signals: LayerSignals) -> LayerSignals:
    def copy(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.clone()

    return LayerSignals(
        copy(signals.queries),
        copy(signals.mass),
        copy(signals.positions),
        signals.output_projection,
        copy(signals.future_queries),
        copy(signals.read_again),
    )


@dataclass(frozen=True)
class Recorder(CompressionPolicy):
    """Ranks by whatever it has: mass, the attention of recent or future queries, else ||k||."""

    want: str = "mass"
    window: int = 5
    only_prompt: bool = False

    name = "recorder"
    seen: ClassVar[list[Seen]] = []

    @property
    def needs(self) -> frozenset[Signal]:
        return NEEDS[self.want]

    @property
    def query_window(self) -> int:
        return self.window

    @property
    def prompt_only(self) -> bool:
        return self.only_prompt

    def score(self, view: LayerView) -> Tensor:
        signals, keys = view.signals, view.keys.float()
        self.seen.append(Seen(view.layer, view.logical_len, copied(signals), keys))
        if signals.mass is not None:
            return signals.mass.clone()
        queries = signals.queries if signals.queries is not None else signals.future_queries
        if queries is None or queries.shape[1] == 0:
            return keys.norm(dim=-1)
        grouped = queries.float().unflatten(0, (keys.shape[0], -1)).flatten(1, 2)
        return torch.softmax(grouped @ keys.transpose(1, 2) * view.facts.softmax.scale, -1).sum(1)


@dataclass(frozen=True)
class BlockRecorder(Recorder):
    """The same for whole blocks."""

    name = "block-recorder"
    eviction_method = EvictionMethod.BLOCKS
    default_mode = Mode.UNION


@dataclass(frozen=True)
class UnevenRecorder(Recorder):
    """The same for heads that keep unequal numbers: every other head keeps twice as many."""

    name = "uneven-recorder"
    eviction_method = EvictionMethod.CELLS

    def counts(self, question: CountsQuestion) -> Tensor:
        layers, heads = question.limit.shape
        return question.protected + question.free * torch.tensor([[2 / 3, 4 / 3]]).repeat(layers, heads // 2)


@dataclass(frozen=True)
class RelativeRecorder(Recorder):
    """The same where a token's position is its slot."""

    name = "relative-recorder"
    cache_relative = True


def register(monkeypatch) -> type[Recorder]:
    """Make them known policies, with nothing seen yet."""
    every = (Recorder, BlockRecorder, UnevenRecorder, RelativeRecorder)
    known = registry._BUILT_IN | {policy.name: policy for policy in every}
    monkeypatch.setattr(registry, "_BUILT_IN", known)
    Recorder.seen.clear()
    return Recorder
