"""Prefill over latents: at how many new tokens expanding the keys is faster than absorbing the queries.

One layer of DeepSeek-V3's head dims, one sequence, blocks in random order. Both ways start at the model's own
queries and the latents in the cache, and end at the heads' outputs, so up-projections count. They are
compared first (nothing is timed while they differ) and then timed in turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import numpy as np
import torch
from rich.table import Table
from torch import Tensor

from kvreclaim.bench.bandwidth import timed
from kvreclaim.bench.common import Row, alternate, sheet, spread
from kvreclaim.bench.kernels import TOLERANCES, WrongKernelError
from kvreclaim.bench.plans import LatentPlan
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.loader import DTYPES
from kvreclaim.ops.backend import Need, choose_backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.facts import LayerFacts, Softmax
from kvreclaim.ops.formats import kv_format
from kvreclaim.ops.kv_cache import PagedTokens
from kvreclaim.ops.latent import UpProjection, expanded_attention

RANK, NOPE, ROTARY, VALUE = 512, 128, 64, 128
"""DeepSeek-V2's and V3's; the number of heads is the plan's."""
SCALE = (NOPE + ROTARY) ** -0.5
BLOCK_SIZE = 16


class _Chunk:
    """The newest tokens of one sequence over a filled cache."""

    def __init__(self, plan: LatentPlan, context: int, new: int) -> None:
        device, dtype, length = torch.device(plan.device), DTYPES[plan.dtype], context + new
        layer = LayerFacts(plan.heads, 1, RANK + ROTARY, RANK, Softmax(SCALE), latent=True)
        form = kv_format(plan.kv_cache_dtype, dtype)
        self.backend = choose_backend(plan.kernels, Need((layer,), BLOCK_SIZE, dtype, device, form)).backend
        like = torch.empty(0, dtype=dtype, device=device)
        blocks = blocks_for(length, BLOCK_SIZE)
        self.cache = self.backend.allocate(
            (layer,), blocks, BLOCK_SIZE, like=like, kv_format=form, open_rows=2
        )
        table = np.random.default_rng(0).permutation(blocks).astype(np.int32)
        ids = torch.from_numpy(table.astype(np.int64)).to(device)
        self.backend.keep_open(self.cache, [int(table[-1])])
        self.tokens = PagedTokens(self.cache.layers[0], ids, length)
        slots = torch.arange(length, device=device)
        keys = _noise(1, length, 1, RANK + ROTARY).to(like)
        mapping = ids[slots // BLOCK_SIZE] * BLOCK_SIZE + slots % BLOCK_SIZE
        self.backend.write_kv(self.cache.layers[0], keys, keys[..., :RANK], mapping)
        both = (_noise(2, plan.heads, NOPE + VALUE, RANK) / RANK**0.5).to(like)
        self.weights = UpProjection(*both.split([NOPE, VALUE], dim=1))
        self.query = _noise(3, new, plan.heads, NOPE + ROTARY).to(like)
        self.batch = AttentionBatch.build((SequenceSlots(table, new, length),), BLOCK_SIZE, device)

    def absorbed(self) -> Tensor:
        q = self.weights.absorb(self.query)
        out = self.backend.paged_attention(q, self.cache.layers[0], self.batch)
        return self.weights.finish(out)

    def expanded(self) -> Tensor:
        return expanded_attention(self.backend, self.tokens, self.query, self.weights)

    def error(self) -> float:
        """Largest difference of the two ways, over the largest value. Raises: WrongKernelError."""
        absorbed, expanded = self.absorbed().float(), self.expanded().float()
        error = float((absorbed - expanded).abs().max() / expanded.abs().max())
        allowed = TOLERANCES[self.query.dtype]
        if not error <= allowed:
            raise WrongKernelError(
                f"{self.backend.NAME}: absorbed and expanded attention differ by {error:.2e} of the largest "
                f"value (allowed {allowed:.0e}); nothing was timed."
            )
        return error


def _noise(seed: int, *size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def run(plan: LatentPlan) -> list[Row]:
    """Rows with context, new_tokens, absorbed_ms, expanded_ms, gain (absorbed over expanded; medians), takes
    (which way the engine goes), error and spread. Raises: WrongKernelError if the two ways differ."""
    return [_measure(plan, context, new) for context in plan.contexts for new in plan.new_tokens]


def _measure(plan: LatentPlan, context: int, new: int) -> Row:
    chunk = _Chunk(plan, context, new)
    error = chunk.error()
    ways = {"absorbed": chunk.absorbed, "expanded": chunk.expanded}
    rounds = alternate({name: partial(timed, way, plan.device) for name, way in ways.items()}, plan.rounds)
    absorbed, expanded = (median(rounds[name]) for name in ways)
    return {
        "kernels": chunk.backend.NAME,
        "kv_cache_dtype": chunk.cache.format.name,
        "heads": plan.heads,
        "context": context,
        "new_tokens": new,
        "absorbed_ms": absorbed * 1e3,
        "expanded_ms": expanded * 1e3,
        "gain": absorbed / expanded,
        "takes": "expanded" if chunk.weights.expands(new, context + new, ROTARY) else "absorbed",
        "error": error,
        "spread": max(spread(values) for values in rounds.values()),
    }


def latent_table(rows: Sequence[Row]) -> Table:
    """For people."""
    first = rows[0]
    title = f"prefill over latents, {first['heads']} heads ({first['kernels']}, {first['kv_cache_dtype']})"
    columns = {
        "tokens before": "{context:,}",
        "new": "{new_tokens:,}",
        "absorbed ms": "{absorbed_ms:,.1f}",
        "expanded ms": "{expanded_ms:,.1f}",
        "gain": "{gain:.2f}",
        "taken": "{takes}",
    }
    return sheet(title, columns, rows, text_columns=0)
