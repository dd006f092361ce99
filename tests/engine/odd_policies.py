"""Small policies of every kind that the engine treats in a way of its own, and how a test registers them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvreclaim.compression import registry
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.compression.policy import CompressionPolicy, CountsQuestion, LayerView, Mode
from kvreclaim.compression.wrapping import fill
from kvreclaim.schedule.budget.eviction_method import EvictionMethod


@dataclass(frozen=True)
class BlockNorm(Knorm):
    """Whole blocks, by the norms of their keys."""

    name = "block-norm"
    eviction_method = EvictionMethod.BLOCKS
    default_mode = Mode.UNION


@dataclass(frozen=True)
class PromptNorm(Knorm):
    """Compresses once, at the end of the prompt."""

    name = "prompt-norm"
    prompt_only = True


@dataclass(frozen=True)
class EarlyFirst(CompressionPolicy):
    """Keeps the earliest tokens."""

    name = "early-first"
    eviction_method = EvictionMethod.BLOCKS
    default_mode = Mode.UNION

    def score(self, view: LayerView) -> Tensor:
        heads, tokens = view.source.shape
        return -torch.arange(tokens, dtype=torch.float32).repeat(heads, 1)


@dataclass(frozen=True)
class HeadNorm(Knorm):
    """Unequal heads: the top tokens of all heads of a layer together, by the norms of their keys; the first
    layer keeps half as much again as its share."""

    name = "head-norm"
    eviction_method = EvictionMethod.CELLS

    def counts(self, question: CountsQuestion) -> Tensor:
        scores, room = question.scores, question.limit.sum(dim=1)
        layers, heads = len(scores), len(scores[0])
        places = question.free * heads
        wanted = torch.full_like(room, places)
        wanted[0] += places / 2
        wanted[-1] -= places / 2
        counts = question.protected + torch.zeros(layers, heads, dtype=torch.float64)
        for layer, (rows, share) in enumerate(zip(scores, fill(wanted, room, places * layers), strict=True)):
            owner = torch.cat([torch.full((row.numel(),), head) for head, row in enumerate(rows)])
            top = torch.cat(list(rows)).topk(round(float(share))).indices
            counts[layer] += torch.bincount(owner[top.cpu()], minlength=heads)
        return counts


@dataclass(frozen=True)
class HeadMixture(QueryMixture):
    """Unequal heads with statistics: the last layer and the last head keep more."""

    name = "head-mixture"
    eviction_method = EvictionMethod.CELLS

    def counts(self, question: CountsQuestion) -> Tensor:
        layers, heads = question.limit.shape
        slope = torch.linspace(-0.4, 0.4, layers)[:, None] + torch.linspace(-0.3, 0.3, heads)
        wanted = question.free * (1 + slope.double())
        return question.protected + fill(wanted, question.limit, float(wanted.sum()))


POLICIES = (BlockNorm, PromptNorm, EarlyFirst, HeadNorm, HeadMixture)


def register(monkeypatch) -> None:
    """Make them known by name for one test."""
    known = {**registry._BUILT_IN, **{cls.name: cls for cls in POLICIES}}
    monkeypatch.setattr(registry, "_BUILT_IN", known)
