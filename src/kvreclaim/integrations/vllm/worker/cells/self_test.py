"""A test at start: a back-end's attention reads cells of any layer and head by the addresses of the grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.worker.cells.grid import CellGrid
from kvreclaim.integrations.vllm.worker.cells.heads import StepCells
from kvreclaim.integrations.vllm.worker.layer_cache import restored, write_tokens
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.moving import to_device

BLOCKS = 4
"""The last ones of the pool: offsets are largest there."""
QUERIES = (1, 3, 1)
"""Queries of each row."""
SPREAD = 3.0
"""Spread of the logits: one token decides, so that a token at a wrong place cannot go unseen."""
TOLERANCE = 0.05
"""Over the largest number of the answer: what bf16 may make of it. A wrong token is of the order of 1."""

Attend = Callable[[int, Tensor, StepCells], Tensor]
"""(layer, queries [rows, G, D], step) -> [rows, G, D]."""


def prove_cells(views: CacheViews, grid: CellGrid, facts: Sequence[LayerFacts], attend: Attend) -> None:
    """Write random tokens through the back-end, assign their cells to rows at random, and compare the
    back-end's attention with softmax over the contents of those cells. Blocks are restored.

    Args:
        facts:  of the layers
        attend: the back-end

    Raises: UnsupportedModelError if they differ.
    """
    generator = torch.Generator().manual_seed(0)
    total = views.layers[0].cache.shape[0]
    blocks = torch.arange(max(0, total - BLOCKS), total)
    with ExitStack() as stack:
        for layer in views.layers:
            stack.enter_context(restored(layer.cache, blocks.to(views.device)))
        _write(views, blocks, generator)
        _compare_reads(views, grid, blocks)
        step = _step(grid, blocks, generator)
        for n in range(grid.num_layers):
            queries, expected = _expected(views, grid, n, step, facts[n], generator)
            found = attend(n, queries, step).float()
            error = float((found - expected).abs().max() / expected.abs().max())
            if not error <= TOLERANCE:
                raise UnsupportedModelError(
                    f"{views.layers[n].name}: attention over cells differs from what they hold by {error:.2f}"
                )


def _write(views: CacheViews, blocks: Tensor, generator: torch.Generator) -> None:
    for layer in views.layers:
        size = layer.block_size
        slots = (blocks[:, None] * size + torch.arange(size)).flatten()
        shape = (len(slots), layer.num_kv_heads, layer.head_dim)
        keys, values = (torch.randn(shape, generator=generator).to(views.device) for _ in range(2))
        write_tokens(layer, keys, values, slots.to(views.device))


def _compare_reads(views: CacheViews, grid: CellGrid, blocks: Tensor) -> None:
    natural = torch.from_numpy(grid.natural(blocks.numpy())).long().to(views.device)
    tokens, ids = len(blocks) * grid.block_size, blocks.to(views.device)
    for n, layout in enumerate(views.layouts):
        for part in (0, 1):
            whole = layout.gather(part, ids, tokens)
            own = torch.cat(
                [grid.layout.gather(part, natural[n, h], tokens) for h in range(grid.num_kv_heads)]
            )
            if not torch.equal(whole, own):
                raise UnsupportedModelError(f"{views.layers[n].name}: cells are not where they should be")


def _step(grid: CellGrid, blocks: Tensor, generator: torch.Generator) -> StepCells:
    """Return rows of unequal lengths with cells of random layers and heads."""
    size, (layers, _) = grid.block_size, grid.shape
    every = torch.from_numpy(grid.natural(blocks.numpy())).flatten()
    most = max(1, min(3, len(every) // len(QUERIES)))
    lengths = torch.tensor([most * size, most * size - size // 2, size - 1])
    tables = torch.stack(
        [
            every[torch.randperm(len(every), generator=generator)[: 3 * most]].view(3, most)
            for _ in range(layers)
        ]
    )
    starts = torch.tensor([0, *QUERIES]).cumsum(0)
    return StepCells(
        to_device(tables.int().contiguous(), grid.device),
        to_device(lengths.int().expand(layers, -1).contiguous(), grid.device),
        to_device(starts.int(), grid.device),
        None,
        grid.num_kv_heads,
        max(QUERIES),
        most * size,
    )


def _expected(
    views: CacheViews,
    grid: CellGrid,
    layer: int,
    step: StepCells,
    facts: LayerFacts,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return queries [5, G, D] and causal softmax over the cells of each row: [5, G, D] fp32."""
    own = views.layers[layer]
    queries = torch.randn((sum(QUERIES), facts.group_size, own.head_dim), generator=generator) * SPREAD
    queries = queries.to(own.compute).to(views.device)
    softmax, answers = facts.softmax, []
    for row, part_queries in enumerate(queries.split(QUERIES)):
        length = int(step.lengths[layer, row])
        cells = step.tables[layer, row, : blocks_for(length, grid.block_size)].long()
        keys, values = (
            own.plain(grid.layout.gather(part, cells, length), part)[0].float() for part in (0, 1)
        )
        logits = torch.einsum("qgd,td->qgt", part_queries.float(), keys) * softmax.scale
        if softmax.softcap is not None:
            logits = softmax.softcap * torch.tanh(logits / softmax.softcap)
        last = length - len(part_queries) + torch.arange(len(part_queries), device=views.device)
        hidden = torch.arange(length, device=views.device) > last[:, None, None]
        answers.append(logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    return queries, torch.cat(answers)
