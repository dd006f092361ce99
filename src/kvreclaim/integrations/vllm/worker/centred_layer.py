"""An attention layer that stores centred and scaled keys. Nothing here knows the host's classes.

Keys and queries are changed where the layer is given them, before anything is written. So back-ends,
quantisation and attention over cells need no change. Buffers belong to the module: torch.compile takes them
as inputs, and CUDA graphs read them where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.facts import KeyTransform


class CentredKeys:
    """Mixed into a class of attention layers: (key - center) / scale in the cache, queries times scale.

    Source: ops/transformed_keys.py.

    centring_queries: [H, D], factors of queries
    centring_inverse: [K, D], factors of keys
    centring_offset:  [K, D], added to keys afterwards
    """

    centring_queries: Tensor
    centring_inverse: Tensor
    centring_offset: Tensor
    num_heads: int
    num_kv_heads: int
    head_size: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer's own forward pass with scaled queries and centred keys."""
        queries = query.view(-1, self.num_heads, self.head_size) * self.centring_queries
        keys = key.view(-1, self.num_kv_heads, self.head_size)
        keys = torch.addcmul(self.centring_offset, keys, self.centring_inverse)
        answer: Tensor = super().forward(  # type: ignore[misc]
            queries.view(query.shape), keys.view(key.shape), value, *args, **kwargs
        )
        return answer


def centre(layer: Any, kind: type[CentredKeys], own: KeyTransform, like: Tensor) -> None:
    """Have a layer store its keys so from now on.

    kind: the class that it gets
    own:  [K, D]
    like: of the device and the dtype of keys
    """
    own = own.to(like.device, like.dtype)
    queries = own.scale.repeat_interleave(layer.num_heads // layer.num_kv_heads, 0)
    for name, buffer in (("queries", queries), ("inverse", own.inverse), ("offset", own.offset)):
        layer.register_buffer(f"centring_{name}", buffer.clone(), persistent=False)
    layer.__class__ = kind


def transform_of(layer: Any) -> KeyTransform | None:
    """Return a layer's transform of its keys, in fp32; None if it has none."""
    if not isinstance(layer, CentredKeys):
        return None
    scale = 1 / layer.centring_inverse.float()
    return KeyTransform(scale, -layer.centring_offset.float() * scale)
