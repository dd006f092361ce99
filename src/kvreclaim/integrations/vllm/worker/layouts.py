"""Layouts of keys and values in the host engine's blocks: reads in token order, moves in place."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.worker.layer_cache import VllmLayerCache, as_float, restored, write_tokens
from kvreclaim.integrations.vllm.worker.staging import CacheSource, Stage
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.key_transform import KeyTransform
from kvreclaim.ops.moving import to_device
from kvreclaim.ops.reference import compact_layer, gather_slots

BITS = 3
"""Bits of an index that are written at once: 0 to 7 are exact in every dtype that a cache may have, fp8
included."""
NEAR = 0.5
"""Most that a packed token may differ from what was written, over its norm; another token differs by 1.4."""


class CacheLayout(Protocol):
    """One layer's order.

    gather:  keys (part 0) or values (part 1), [K, T, D] as stored; a copy
    compact: as ops.reference.compact_layer, keys and values: sources and targets may overlap
    """

    def gather(self, part: int, block_ids: Tensor, num_tokens: int) -> Tensor: ...

    def compact(self, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class StridedLayout:
    """keys and values are views [B, K, S, D] of the cache, or of bytes."""

    keys: Tensor
    values: Tensor

    def gather(self, part: int, block_ids: Tensor, num_tokens: int) -> Tensor:
        return gather_slots((self.keys, self.values)[part], block_ids, num_tokens)

    def compact(self, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        compact_layer(self.keys, kept, source_ids, target_ids)
        compact_layer(self.values, kept, source_ids, target_ids)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLayout:
    """raw [B, K, 2 * S * D]; element (key or value, slot, dim) of a block lies at order [2, S, D] of it."""

    raw: Tensor
    order: Tensor

    def gather(self, part: int, block_ids: Tensor, num_tokens: int) -> Tensor:
        every = torch.arange(block_ids.shape[0], device=block_ids.device)
        return gather_slots(self._unpack(block_ids, self.order[part]), every, num_tokens)

    def compact(self, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        blocks = torch.stack([self._unpack(source_ids, order) for order in self.order])
        source = torch.arange(source_ids.shape[0], device=source_ids.device)
        target = source[: target_ids.shape[0]]
        for part in blocks:
            compact_layer(part, kept, source, target)
        moved = blocks[:, : target_ids.shape[0]]
        packed = self.raw.new_empty((moved.shape[1], moved.shape[2], self.raw.shape[-1]))
        packed[..., self.order.flatten()] = moved.permute(1, 2, 0, 3, 4).flatten(2)
        self.raw[target_ids] = packed

    def _unpack(self, block_ids: Tensor, order: Tensor) -> Tensor:
        """[blocks, K, S, D], a copy."""
        found = self.raw.index_select(0, block_ids).index_select(-1, order.flatten())
        return found.unflatten(-1, order.shape)


@dataclass(frozen=True, slots=True, eq=False)
class JoinedLayout:
    """A layout with a further plane [B, K, S, n] of numbers per slot, which moves with the slots."""

    layout: CacheLayout
    plane: Tensor

    def gather(self, part: int, block_ids: Tensor, num_tokens: int) -> Tensor:
        return self.layout.gather(part, block_ids, num_tokens)

    def compact(self, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        self.layout.compact(kept, source_ids, target_ids)
        compact_layer(self.plane, kept, source_ids, target_ids)


class CacheViews:
    """All layers' caches, in the order of the layers, addressed by the blocks of the host's block tables.

    Args:
        layers:     equal in shape
        num_blocks: blocks of the host's pool; a layer's cache has a multiple of them

    Raises: UnsupportedModelError if a backend's order inside a block is not understood.
    """

    def __init__(self, layers: Sequence[VllmLayerCache], num_blocks: int) -> None:
        self.layers = tuple(layers)
        self.num_blocks = num_blocks
        blocks = {layer.cache.shape[0] for layer in layers}
        self.ratio, rest = divmod(max(blocks), num_blocks)
        if len(blocks) != 1 or rest or not self.ratio:
            raise UnsupportedModelError(
                f"The layers' caches have {sorted(blocks)} blocks for a pool of {num_blocks}; kv_compression "
                "needs layers that share one kind of block. Leave it out for this model."
            )
        self.block_size = layers[0].block_size * self.ratio
        self.device = layers[0].cache.device
        self.layouts: tuple[CacheLayout, ...] = tuple(_layout(layer) for layer in layers)

    def joining(self, planes: Sequence[Tensor]) -> CacheViews:
        """Return views of the caches with a further plane per layer, which moves with the slots."""
        other = copy(self)
        other.layouts = tuple(map(JoinedLayout, self.layouts, planes))
        return other

    def restoring(self, keys: Sequence[KeyTransform | None]) -> CacheViews:
        """Return views of the caches that undo each layer's transform [K, D] of keys in reads."""
        other = copy(self)
        other.layers = tuple(replace(layer, keys=own) for layer, own in zip(self.layers, keys, strict=True))
        return other

    def block_ids(self, ids: Sequence[int]) -> Tensor:
        """[blocks * ratio] int64 on the device: a block table's ids as the backends count. No host sync."""
        table = to_device(torch.tensor(ids, dtype=torch.int64), self.device)
        if self.ratio == 1:
            return table
        return (table[:, None] * self.ratio + torch.arange(self.ratio, device=self.device)).flatten()

    def read(self, layer: int, block_ids: Tensor, num_tokens: int, part: int) -> Tensor:
        """Keys (part 0) or values (1) of a layer in the first num_tokens slots of a table (see block_ids).

        Returns: [K, T, D], a copy; in fp32 from a quantised cache.
        """
        return self.layers[layer].plain(self.layouts[layer].gather(part, block_ids, num_tokens), part)

    def source(
        self, layer: int, block_ids: Tensor, num_tokens: int, stage: Stage | None = None
    ) -> CacheSource:
        """Return tokens for a policy; valid until the cache changes or the stage is used again."""
        shape = (self.layers[layer].num_kv_heads, num_tokens)
        return CacheSource(shape, self.device, partial(self.read, layer, block_ids, num_tokens), stage)

    def compact(self, kept: Tensor, source_ids: Tensor, target_ids: Tensor) -> None:
        """Slide the kept slots [L | 1, K | 1, M] int64, ascending, of all layers from one table into another.

        target_ids: [>= blocks of M slots]; may share blocks with source_ids.
        """
        heads = self.layers[0].num_kv_heads
        target_ids = target_ids[: blocks_for(kept.shape[-1], self.layers[0].block_size)]
        for layer, rows in zip(self.layouts, kept.expand(len(self.layers), heads, -1), strict=True):
            layer.compact(rows, source_ids, target_ids)

    def prove(self) -> None:
        """Write two blocks of every layer through its own backend and read them back; they are restored.

        Raises: UnsupportedModelError if what is read differs.
        """
        blocks = [self.num_blocks - 1, max(0, self.num_blocks - 2)]
        table = self.block_ids(blocks)
        size = self.layers[0].block_size
        slots = (table[:, None] * size + torch.arange(size, device=self.device)).flatten()
        for layer, layout in zip(self.layers, self.layouts, strict=True):
            written = _sample(layer, slots.shape[0]).to(self.device)
            with restored(layer.cache, table):
                write_tokens(layer, written[0], written[1], slots)
                found = [layout.gather(part, table, slots.shape[0]) for part in (0, 1)]
            for part, tokens in enumerate(written):
                if not _is(layer, found[part], part, tokens.transpose(0, 1).float()):
                    raise UnsupportedModelError(
                        f"{layer.name}: what the backend stores is not where kvreclaim reads it; this "
                        "build's cache layout is unknown to it. Use another --attention-backend, or leave "
                        "kv_compression out."
                    )


def _is(layer: VllmLayerCache, stored: Tensor, part: int, written: Tensor) -> bool:
    """Return whether the gathered numbers equal the written ones, [K, T, D]."""
    if layer.slots is None:
        return torch.equal(as_float(stored, layer.stored), written)
    error = torch.linalg.vector_norm(layer.plain(stored, part) - written, dim=-1)
    return bool((error <= NEAR * torch.linalg.vector_norm(written, dim=-1)).all())


def _sample(layer: VllmLayerCache, num_tokens: int) -> Tensor:
    """Keys and values [2, T, K, D] to write: digits, which are stored exactly, or random where scales are."""
    shape, generator = (2, num_tokens, layer.num_kv_heads, layer.head_dim), torch.Generator().manual_seed(1)
    if layer.slots is not None:
        return torch.randn(shape, generator=generator)
    return torch.randint(0, 1 << BITS, shape, generator=generator)


def _layout(layer: VllmLayerCache) -> CacheLayout:
    """Addressing of one layer. The element size is all that a move needs: fp8 is moved as bytes."""
    if not layer.packed:
        middle = layer.head_dim
        parts = (slice(0, middle), slice(middle, 2 * middle)) if layer.slots is None else layer.slots.parts
        return StridedLayout(*(layer.cache[..., part] for part in parts))
    size, dim = layer.block_size, layer.head_dim
    order = _learn(layer)
    raw = layer.cache.view(*layer.cache.shape[:2], 2 * size * dim)
    views = [_strided(raw, part) for part in order.cpu()]
    if views[0] is not None and views[1] is not None:
        return StridedLayout(views[0], views[1])
    return PackedLayout(raw, order)


def _learn(layer: VllmLayerCache) -> Tensor:
    """[2, S, D]: where element (key or value, slot, dim) lies in a (block, head). Found by writing each
    element's own number, a digit at a time. The block is restored.

    Raises: UnsupportedModelError if heads differ, or the order is no permutation.
    """
    size, dim, heads = layer.block_size, layer.head_dim, layer.num_kv_heads
    count, device = 2 * size * dim, layer.cache.device
    numbers = torch.arange(count, device=device).view(2, size, 1, dim).expand(-1, -1, heads, -1)
    block = torch.tensor([layer.cache.shape[0] - 1], device=device)
    slots = block * size + torch.arange(size, device=device)
    found = torch.zeros((heads, count), dtype=torch.int64, device=device)
    with restored(layer.cache, block):
        for shift in range(0, count.bit_length(), BITS):
            keys, values = numbers >> shift & (1 << BITS) - 1
            write_tokens(layer, keys, values, slots)
            stored = layer.cache[block].reshape(heads, count)
            found += as_float(stored, layer.stored).round().long() << shift
    order = found[0].argsort()
    every = torch.arange(count, device=device)
    if not (torch.equal(found, found[:1].expand_as(found)) and torch.equal(found[0][order], every)):
        raise UnsupportedModelError(
            f"{layer.name}: the order of elements inside a block could not be learned; this build's cache "
            "layout is unknown to kvreclaim. Leave kv_compression out."
        )
    return order.view(2, size, dim)


def _strided(raw: Tensor, order: Tensor) -> Tensor | None:
    """raw [B, K, 2SD] as [B, K, S, D] if the order [S, D] is one of strides; else None."""
    size, dim = order.shape
    start = int(order[0, 0])
    by_slot = int(order[1, 0]) - start if size > 1 else 1
    by_dim = int(order[0, 1]) - start if dim > 1 else 1
    affine = start + torch.arange(size)[:, None] * by_slot + torch.arange(dim) * by_dim
    if not torch.equal(affine, order) or by_slot <= 0 or by_dim <= 0:
        return None
    return raw.as_strided(
        (*raw.shape[:2], size, dim), (*raw.stride()[:2], by_slot, by_dim), raw.storage_offset() + start
    )
