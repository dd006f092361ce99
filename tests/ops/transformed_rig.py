"""Back-ends over transformed keys, with a transform for every layer of their caches."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paged_oracle import noise

from kvreclaim.ops.facts import KeyTransform, LayerFacts
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.transformed_keys import TransformedKeys


def transform_of(layer: int, facts: LayerFacts, centred: bool = True) -> KeyTransform:
    """Powers of two, and centres of the size of a key; each channel has its own."""
    shape = facts.num_kv_heads, facts.head_dim
    scale = noise(layer, *shape).mul(3).round().clamp(-6, 6).exp2()
    return KeyTransform(scale, noise(layer + 100, *shape).mul(1 if centred else 0))


@dataclass(frozen=True, slots=True)
class Transformed(TransformedKeys):
    """With a transform of its own for every layer."""

    centred: bool = True

    def allocate(self, layers: tuple[LayerFacts, ...], *args: Any, **kwargs: Any) -> KVCache:
        own = [
            replace(layer, softmax=replace(layer.softmax, keys=transform_of(n, layer, self.centred)))
            for n, layer in enumerate(layers)
        ]
        found: KVCache = self.backend.allocate(tuple(own), *args, **kwargs)
        return found
