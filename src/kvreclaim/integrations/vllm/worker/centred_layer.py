"""An attention layer that stores transformed keys. Nothing here knows the host's classes.

Keys and queries are changed where the layer is given them, before anything is written. So back-ends,
quantisation and attention over cells need no change. Buffers belong to the module: torch.compile takes them
as inputs, and CUDA graphs read them where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.key_transform import KeyTransform, transform_rows


class CentredKeys:
    """Mixed into a class of attention layers that stores transformed keys. Source: ops/transformed_keys.py.

    centring_scale, _inverse: [K, D], factors of queries and of keys
    centring_offset:          [K, D], what is added to keys afterwards
    centring_along:           KeyTransform.directions; None without
    centring_keys, _queries:  [K, R, D], what is added for parts along them; None without
    """

    centring_scale: Tensor
    centring_inverse: Tensor
    centring_offset: Tensor
    centring_along: Tensor | None
    centring_keys: Tensor | None
    centring_queries: Tensor | None
    key_transform: KeyTransform
    num_heads: int
    num_kv_heads: int
    head_size: int

    def take(self, own: KeyTransform) -> None:
        """Store keys by this transform."""
        self.key_transform = own
        inverse, offset, along, keys = own.of_keys
        scale, _, _, queries = own.of_queries
        buffers = {"scale": scale, "inverse": inverse, "offset": offset}
        buffers |= {"along": along, "keys": keys, "queries": queries}
        module: Any = self
        for name, buffer in buffers.items():
            copied = None if buffer is None else buffer.clone()
            module.register_buffer(f"centring_{name}", copied, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer's own forward pass with transformed queries and keys."""
        along, size = self.centring_along, self.head_size
        queries = query.view(-1, self.num_heads, size)
        queries = transform_rows(queries, self.centring_scale, None, along, self.centring_queries)
        keys = key.view(-1, self.num_kv_heads, size)
        keys = transform_rows(keys, self.centring_inverse, self.centring_offset, along, self.centring_keys)
        answer: Tensor = super().forward(  # type: ignore[misc]
            queries.view(query.shape), keys.view(key.shape), value, *args, **kwargs
        )
        return answer


def centre(layer: Any, kind: type[CentredKeys], own: KeyTransform, like: Tensor) -> None:
    """Have a layer store its keys so from now on.

    kind: the class that it gets
    own:  of the layer's KV heads
    like: of the device and the dtype of keys
    """
    layer.__class__ = kind
    layer.take(own.to(like.device, like.dtype))


def transform_of(layer: Any) -> KeyTransform | None:
    """Return a layer's transform of its keys, in fp32; None if it has none."""
    if not isinstance(layer, CentredKeys):
        return None
    return layer.key_transform.to(layer.centring_scale.device, torch.float32)
