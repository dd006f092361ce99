"""Back-ends over transformed keys, with a transform for every layer of their caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from paged_oracle import noise

from kvreclaim.ops.facts import LayerFacts
from kvreclaim.ops.key_transform import KeyTransform
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.transformed_keys import TransformedKeys


def transform_of(layer: int, facts: LayerFacts, centred: bool = True) -> KeyTransform:
    """Powers of two for each channel and, where centred, centres of the size of a key and directions."""
    shape = facts.num_kv_heads, facts.head_dim
    scale = noise(layer, *shape).mul(3).round().clamp(*(-2, 2) if centred else (-6, 6)).exp2()
    if not centred:
        return KeyTransform(scale, torch.zeros(shape))
    directions = torch.linalg.qr(noise(layer + 200, *shape, 3))[0].transpose(1, 2)
    gains = noise(layer + 300, shape[0], 3).exp()
    return KeyTransform(scale, noise(layer + 100, *shape), directions, gains)


@dataclass(frozen=True, slots=True)
class Transformed(TransformedKeys):
    """Transformed keys with another transform for every layer."""

    centred: bool = True

    def allocate(self, layers: tuple[LayerFacts, ...], *args: Any, **kwargs: Any) -> KVCache:
        own = [
            replace(layer, softmax=replace(layer.softmax, keys=transform_of(n, layer, self.centred)))
            for n, layer in enumerate(layers)
        ]
        found: KVCache = self.backend.allocate(tuple(own), *args, **kwargs)
        return found
