"""Full caches in host memory: what they exclude, and how they come to be."""

from __future__ import annotations

import logging
from dataclasses import replace

from torch import Tensor

from kvreclaim.checks import require
from kvreclaim.chunks import Chunks
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.outputs import EngineTotals
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.formats import KVFormat
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.streamed import StreamedLayers, host_cache

logger = logging.getLogger(__name__)
FIELD = "full_cache_host_size"


def check_full_cache(
    config: EngineConfig, form: KVFormat, groups: LayerGroups, method: SparsePrefill | None
) -> None:
    """Raise InvalidArgumentError where what the engine is to do excludes full caches in host memory."""
    if not config.full_cache_host_size:
        return
    set_to, name = f"{FIELD} is {config.full_cache_host_size:g}", groups.model.name
    require(
        not form.has_open_blocks,
        f"{set_to}, but kv_cache_dtype {form.name} keeps rows of their own beside blocks that are not full, "
        "which have no places in host memory; use another kv_cache_dtype, or leave the size out.",
        FIELD,
    )
    require(
        not groups.windows,
        f"{set_to}, but layers of {name!r} with sliding windows have block tables of their own, which have "
        "no places in host memory; start with disable_hybrid_kv_cache_manager=True, or leave the size out.",
        FIELD,
    )
    if method is not None:
        _refuse_sparse(method)


def check_kept(
    compressor: Compressor | None, method: SparsePrefill | None, chunks: Chunks | None, config: EngineConfig
) -> None:
    """Raise InvalidArgumentError for a request that does not keep its full cache, where that lies in host
    memory."""
    if compressor is not None and not compressor.eviction_method.keeps_all:
        raise InvalidArgumentError(
            f"policy {compressor.policy.name} keeps its survivors on the device, and {FIELD} is "
            f"{config.full_cache_host_size:g}, with which caches lie in host memory; ask for verify=True, "
            "leave the compression out, or start without the size.",
            field="compression",
        )
    if method is not None:
        _refuse_sparse(method)
    require(
        chunks is None,
        f"chunks cannot be reused out of place: {FIELD} is set, and caches that lie in host memory are read "
        "layer by layer; pass the prompt as one text.",
        "prompt",
    )


def check_saved(config: EngineConfig) -> None:
    """Raise InvalidArgumentError for sessions, where caches lie in host memory."""
    require(
        not config.full_cache_host_size,
        f"sessions are not saved where {FIELD} is set; start without it.",
        FIELD,
    )


def _refuse_sparse(method: SparsePrefill) -> None:
    raise InvalidArgumentError(
        f"sparse prefill {method.name} reads some blocks of the cache on the device, and {FIELD} is set, "
        "with which whole layers come from host memory; compute prompts dense, or start without the size.",
        field="sparse_prefill",
    )


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
