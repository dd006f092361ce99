"""An attention layer that stores transformed keys. Nothing here knows the host's classes.

Keys and queries are changed where the layer is given them, before anything is written. So back-ends,
quantisation and attention over cells need no change. Buffers belong to the module: torch.compile takes them
as inputs, and CUDA graphs read them where they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvreclaim.ops.key_transform import KeyTransform, stretched


class CentredKeys:
    """Mixed into a class of attention layers that stores transformed keys. Source: ops/transformed_keys.py.

    centring_scale:                  [K, D], factors of queries
    centring_inverse, _offset:       [K, D], factors of keys, and what is added to them afterwards
    centring_along, _keys, _queries: KeyTransform.of_keys and of_queries; None without directions
    """

    centring_scale: Tensor
    centring_inverse: Tensor
    centring_offset: Tensor
    centring_along: Tensor | None
    centring_keys: Tensor
    centring_queries: Tensor
    key_transform: KeyTransform
    num_heads: int
    num_kv_heads: int
    head_size: int

    def take(self, own: KeyTransform) -> None:
        """Store keys by this transform."""
        self.key_transform = own
        buffers = {"scale": own.scale, "inverse": own.inverse, "offset": own.offset, "along": None}
        if own.directions is not None:
            along, keys = own.of_keys
            buffers |= {"along": along, "keys": keys, "queries": own.of_queries[1]}
        module: Any = self
        for name, buffer in buffers.items():
            copied = None if buffer is None else buffer.clone()
            module.register_buffer(f"centring_{name}", copied, persistent=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layer's own forward pass with transformed queries and keys."""
        group = self.num_heads // self.num_kv_heads
        queries = query.view(-1, self.num_kv_heads, group, self.head_size) * self.centring_scale[:, None]
        keys = key.view(-1, self.num_kv_heads, 1, self.head_size)
        keys = torch.addcmul(self.centring_offset[:, None], keys, self.centring_inverse[:, None])
        if self.centring_along is not None:
            queries = stretched(queries, (self.centring_along, self.centring_queries))
            keys = stretched(keys, (self.centring_along, self.centring_keys))
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
