"""Full caches in host memory: what they exclude, and how they come to be."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import Tensor

from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.outputs import EngineTotals
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.streamed import StreamedLayers, host_cache

logger = logging.getLogger(__name__)


def admitting(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """The limits of a request: num_blocks of them is what full caches have."""
    return replace(config, num_blocks=num_blocks) if config.full_cache_host_size else config


def full_cache(
    config: EngineConfig, groups: LayerGroups, backend: Backend, form: KVFormat, like: Tensor, num_blocks: int
) -> KVCache:
    """A cache of so many blocks in host memory."""
    layers = groups.facts.layers
    cache = host_cache(backend, layers, num_blocks, config.block_size, like=like, kv_format=form)
    num_bytes = num_blocks * cache.bytes_per_block
    logger.info("full cache in host memory: %d blocks, %.2f GiB", num_blocks, num_bytes / 2**30)
    return cache


def streamed_layers(
    cache: KVCache, groups: LayerGroups, backend: Backend, like: Tensor, totals: EngineTotals
) -> StreamedLayers:
    """Brings the layers of a cache in host memory to the device of `like`; bytes are counted in totals."""
    layers, form, size = groups.facts.layers, cache.format, cache.block_size

    def allocate(num_blocks: int) -> KVCache:
        return backend.allocate(layers[:1], num_blocks, size, like=like, kv_format=form)

    return StreamedLayers(backend, cache, allocate, groups.layers(cache, backend), totals)
