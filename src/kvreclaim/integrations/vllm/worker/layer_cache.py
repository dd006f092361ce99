"""The cache of one attention layer of the host engine: its format and writes.

Nothing here knows the host's classes: a VllmLayerCache describes one of its attention layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvreclaim.ops.key_transform import KeyTransform

Write = Callable[[Tensor, Tensor, Tensor], None]
ALL = slice(None)


class SlotFormat(Protocol):
    """The format of a slot with a token's key and value and their own scales.

    parts:  bytes of the key, of the value; they move together
    decode: bytes [K, T, n] of a part as numbers [K, T, D] fp32
    """

    @property
    def parts(self) -> tuple[slice, slice]: ...

    def decode(self, stored: Tensor, part: int) -> Tensor: ...


@dataclass(frozen=True, slots=True, eq=False)
class VllmLayerCache:
    """The cache of one attention layer in its backend's format.

    name:     of the layer, for messages, with that of its backend
    cache:    [B, K, S, 2D] in any strides, bytes [B, K, S, n] where slots have a format; B may count blocks
              smaller than those of the block tables
    head_dim: D
    stored:   dtype of the stored numbers: that of the cache, or the fp8 dtype where the cache is uint8
    compute:  dtype of the keys and values that the backend stores
    k_scale:  factor of a stored fp8 key, one or one per head [K]; v_scale: of a value
    write:    the backend's own: keys [T, K, D] and values [T, K, D] into slots [T] int64
    packed:   the backend orders the 2 * S * D elements of a (block, head) in a way of its own
    slots:    format of a slot; None: key and value in the dtype stored
    keys:     how keys were transformed before they were quantised, [K, 1, D]; None: not at all
    """

    name: str
    cache: Tensor
    head_dim: int
    stored: torch.dtype
    compute: torch.dtype
    k_scale: Tensor | float
    v_scale: Tensor | float
    write: Write
    packed: bool
    slots: SlotFormat | None = None
    keys: KeyTransform | None = None

    @property
    def num_kv_heads(self) -> int:
        return self.cache.shape[1]

    @property
    def block_size(self) -> int:
        """S, of the blocks that the backend sees."""
        return self.cache.shape[2]

    def plain(self, stored: Tensor, part: int, heads: slice = ALL) -> Tensor:
        """Return the model's keys (part 0) or values (1) of some heads, [heads, T, D], from the stored ones:
        unchanged if ops support their dtype, otherwise scaled in fp32."""
        numbers = self._numbers(stored, part)
        return numbers if part or self.keys is None else self.keys.rows(heads).restored(numbers)

    def _numbers(self, stored: Tensor, part: int) -> Tensor:
        if self.slots is not None:
            return self.slots.decode(stored, part)
        if self.stored == stored.dtype:
            return stored
        scale = (self.k_scale, self.v_scale)[part]
        return as_float(stored, self.stored) * (
            scale[:, None, None] if isinstance(scale, Tensor) and scale.ndim else scale
        )


def write_tokens(layer: VllmLayerCache, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """Store small numbers [T, K, D] such that they are in the cache as they are, whatever the scales."""
    scaled = [
        (x * (scale[:, None] if isinstance(scale, Tensor) and scale.ndim else scale)).to(layer.compute)
        for x, scale in ((keys, layer.k_scale), (values, layer.v_scale))
    ]
    layer.write(scaled[0].contiguous(), scaled[1].contiguous(), slots)


@contextmanager
def restored(cache: Tensor, blocks: Tensor) -> Iterator[None]:
    """Restore these blocks on exit."""
    before = cache[blocks]
    try:
        yield
    finally:
        cache[blocks] = before


def as_float(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Stored numbers, not scaled."""
    return stored.view(dtype).float()
