"""A trial at the start: FlashAttention 3 is taken where it agrees with the Triton kernels and is faster."""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.ops.backend import Backend, Need
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.cells import cell_layers
from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.triton.flash import FlashAttention

logger = logging.getLogger(__name__)

MODULE = "flash_attn_interface"
ROWS = 32
"""Sequences of the trial."""
CACHE_BYTES = 256 << 20
"""Keys and values of one layer: more than a GPU's own caches hold."""
CALLS = 10
"""Calls in the graph that is timed."""


def is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def with_flash(backend: Backend, need: Need) -> Backend:
    """The Triton back-end, with FlashAttention 3 where that is installed, agrees and is faster."""
    layers = tuple(layer for layer in need.layers if layer.softmax.sinks is None)
    form = need.kv_format
    is_16_bit = form.is_plain and form.dtype == need.dtype and need.dtype.itemsize == 2
    if not layers or not is_16_bit or not is_hopper(need.device) or importlib.util.find_spec(MODULE) is None:
        return backend
    try:
        flash = importlib.import_module(MODULE).flash_attn_with_kvcache
        served = _served(FlashAttention(backend, flash, {}), layers, need)
    except Exception as error:  # a foreign package may raise anything
        first_line = "".join(str(error).strip().splitlines()[:1])
        logger.warning("FlashAttention 3 is not used: %s: %s", type(error).__name__, first_line)
        return backend
    taken: Any = FlashAttention(backend, flash, served)
    return taken if served else backend


def graph_seconds(run: Callable[[], Tensor]) -> float:
    """Seconds of one call on the device, replayed from a CUDA graph as decode steps are."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / CALLS


def _served(tried: FlashAttention, layers: tuple[LayerFacts, ...], need: Need) -> dict[int, str]:
    """FlashAttention.served of the model's heads and of cells."""
    cache, served = _random_cache(tried.backend, layers, need), dict[int, str]()
    views = {cache.num_kv_heads: ("equal heads", cache.layers)}
    views[1] = ("unequal heads" if cache.num_kv_heads > 1 else "all heads", cell_layers(cache))
    for kv_heads, (name, view) in views.items():
        rows = _Rows.of(cache, view[0].cache, layers[0].group_size)
        flash = replace(tried, served={kv_heads: name})
        if not all(rows.agree(tried.backend, flash, layer) for layer in view):
            logger.warning("FlashAttention 3 is not used for %s: its results differ from Triton's", name)
            continue
        step = rows.batch(np.full(len(rows.tables), rows.longest), np.ones(len(rows.tables)))
        runs = [partial(rows.attend, ops, view[0], step) for ops in (flash, tried.backend)]
        flash_us, triton_us = (graph_seconds(run) * 1e6 for run in runs)
        logger.info("%s: FlashAttention 3 %.1f us, Triton %.1f us", name, flash_us, triton_us)
        if flash_us < triton_us:
            served[kv_heads] = name
    return served


def _random_cache(backend: Any, layers: tuple[LayerFacts, ...], need: Need) -> KVCache:
    """A layer for each of the model's softmaxes, with windows short enough to cut. Its numbers are fixed."""
    size, kinds = need.block_size, dict[tuple[Any, ...], LayerFacts]()
    num_blocks = CACHE_BYTES // need.kv_format.bytes_per_block(layers[:1], size)
    for layer in layers:
        softmax = layer.softmax
        if softmax.window is not None:
            softmax = replace(softmax, window=min(softmax.window, num_blocks // ROWS * size // 3))
        kinds[softmax.scale, softmax.softcap, softmax.window] = replace(layer, softmax=softmax)
    like, own = torch.empty(0, dtype=need.dtype, device=need.device), tuple(kinds.values())
    cache: KVCache = backend.allocate(own, num_blocks, size, like=like, kv_format=need.kv_format)
    generator = torch.Generator(need.device).manual_seed(0)
    for plane in cache.planes:
        plane.normal_(generator=generator)
    return cache


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The trial's sequences: tables [N, W] int32 of blocks of their own, queries [4 N, H, D]."""

    tables: np.ndarray
    size: int
    q: Tensor

    @classmethod
    def of(cls, cache: KVCache, view: KVCache, group: int) -> _Rows:
        """view: the cache, or its cells"""
        rows, width = ROWS * cache.num_kv_heads // view.num_kv_heads, cache.num_blocks // ROWS
        blocks = np.random.default_rng(0).permutation(view.num_blocks)[: rows * width]
        q = cache.planes[0].new_empty(4 * rows, group * view.num_kv_heads, cache.head_dim)
        q.normal_(0, 2, generator=torch.Generator(q.device).manual_seed(1))
        return cls(blocks.astype(np.int32).reshape(rows, width), cache.block_size, q)

    @property
    def longest(self) -> int:
        return self.tables.shape[1] * self.size

    def batch(self, lengths: np.ndarray, queries: np.ndarray) -> AttentionBatch:
        columns = self.tables, queries.astype(int).tolist(), lengths.tolist()
        rows = tuple(SequenceSlots(*row) for row in zip(*columns, strict=True))
        return AttentionBatch.build(rows, self.size, self.q.device)

    def attend(self, ops: Any, layer: LayerCache, batch: AttentionBatch) -> Tensor:
        out: Tensor = ops.paged_attention(self.q[: int(batch.query_lens.sum())], layer, batch)
        return out

    def agree(self, triton: Any, flash: Any, layer: LayerCache) -> bool:
        """Whether results are equal within rounding, with one query for each sequence and with 0 to 4."""
        lengths = np.linspace(0, self.longest, len(self.tables), dtype=np.int64)
        for queries in (np.ones(len(lengths)), np.minimum(np.arange(len(lengths)) % 5, lengths)):
            batch = self.batch(lengths, queries)
            want, got = (self.attend(ops, layer, batch).float() for ops in (triton, flash))
            slack = 4 * torch.finfo(self.q.dtype).eps
            if not torch.allclose(got, want, rtol=slack, atol=slack):
                return False
        return True
