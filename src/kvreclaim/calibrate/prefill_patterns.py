"""Which pattern of sparse prefill serves each head, found on a text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvreclaim.checks import check_int, require
from kvreclaim.compression.prefill.method import SparsePrefill, Tiles
from kvreclaim.compression.prefill.minference import AShape, BlockSparse, VerticalSlash
from kvreclaim.compression.prefill.per_head import Patterns
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.sampling_params import SamplingParams

BLOCK = 64
ROWS = 8
"""Rows of a tile whose attention is looked at."""


def candidates(budget: int, span: int) -> tuple[SparsePrefill, ...]:
    """Return the three patterns, each of which reads about so many tokens before a tile; a distance takes two
    blocks. span: tokens that look for columns and distances together"""
    common = {"block": BLOCK, "layers": 0, "last": 1}
    return (
        AShape(sinks=2 * BLOCK, local=max(BLOCK, budget - 2 * BLOCK), **common),
        VerticalSlash(vertical=budget // 2, slash=max(BLOCK, budget // 4), every=span, **common),
        BlockSparse(top=max(1, budget // BLOCK), **common),
    )


@dataclass(frozen=True)
class _Search(SparsePrefill):
    """Computes a prompt densely, and sums up what each candidate would have read of the attention.

    budget: tokens; tiles with fewer tokens before them are not measured
    found:  by layer [K, candidates] fp64 shares of the attention, summed over tiles
    """

    name = "search"

    methods: tuple[SparsePrefill, ...] = ()
    budget: int = 0
    found: dict[int, Tensor] = field(default_factory=dict, compare=False, repr=False)
    every: int = 1024

    def tile(self, group_size: int) -> int:
        return BLOCK

    @property
    def span(self) -> int:
        return self.every

    def choose(self, tiles: Tiles) -> Tensor:
        masses = _masses(tiles) * (tiles.past * tiles.block > self.budget)[..., None]
        if not masses.any():
            return tiles.visible
        shares = [((method.choose(tiles) & tiles.visible) * masses).sum((0, 2)) for method in self.methods]
        sums = torch.stack(shares, -1).double()
        self.found[tiles.layer] = self.found.get(tiles.layer, 0) + sums
        return tiles.visible


def _masses(tiles: Tiles) -> Tensor:
    """[n, K, N] fp32: the attention of each tile's last rows to the blocks before it, per row and head."""
    keys, heads = tiles.keys(0, int(tiles.ends.max())), tiles.past.shape[1]
    slots = torch.arange(keys.shape[1], device=keys.device)
    found = torch.zeros(tiles.visible.shape, device=keys.device)
    for n, length in enumerate(tiles.lengths.tolist()):
        rows = torch.arange(max(0, length - ROWS), length, device=keys.device)
        queries = tiles.queries[n, rows].float().unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
        last = tiles.ends[n][:, None] - length + rows  # [K, q]
        logits = tiles.scaled(queries @ keys[:, None].mT)
        weights = logits.masked_fill((slots > last[..., None])[:, None], -torch.inf).softmax(-1)
        in_blocks = weights[..., : tiles.num_blocks * tiles.block].unflatten(-1, (-1, tiles.block)).sum(-1)
        found[n] = in_blocks.mean((1, 2))
    return found


def find_patterns(
    llm: LLM, documents: Sequence[list[int]], *, budget: int = 2048, span: int = 1024
) -> Patterns:
    """Choose for each KV head the pattern that covers most of its attention, at `budget` tokens read.

    documents: computed one by one; tokens before the budget are not measured
    span:      tokens that look for columns and distances together

    Raises: InvalidArgumentError where no document is longer than the budget.
    Source: MInference, arXiv 2407.02490, algorithm 4, by the attention that is read instead of by the output.
    """
    check_int("budget", budget, 2 * BLOCK)
    common: dict[str, Any] = {"first": 0, "last": 1, "layers": 0, "block": BLOCK}
    search = _Search(**common, methods=candidates(budget, span), budget=budget, every=span)
    for number, document in enumerate(documents):
        _compute(llm, f"patterns-{number}", document, search)
    facts: ModelFacts = llm.engine.groups.facts
    if len(search.found) < facts.num_layers:
        raise InvalidArgumentError(
            f"no document is long enough to tell patterns apart: the longest has "
            f"{max(map(len, documents), default=0)} tokens, and each reads {budget}; pass longer ones, or a "
            "lower budget."
        )
    heads = tuple(tuple(search.found[layer].argmax(-1).tolist()) for layer in range(facts.num_layers))
    return Patterns(facts.fingerprint, search.methods, heads)


def _compute(llm: LLM, name: str, document: list[int], method: SparsePrefill) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=1)
    request = llm.engine.add_request(name, document, params, sparse_prefill=method)
    while not request.finished:
        llm.engine.step()
    require(request.error is None, f"a document could not be computed: {request.error}.")
