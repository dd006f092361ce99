"""Which layers of a model share block tables.

A block of the pool holds a block of tokens in every layer with full attention. Layers with sliding windows
beside those are put into groups of as many (the last group maybe of fewer), each with tables of its own over
blocks of the same pool: such a block holds a block of tokens in the layers of one group.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.windows.window import Place, Window, grouping
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import KVCache, LayerCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroups:
    """model:   all layers
    facts:   of those with full attention, which compression is about; of all where all share one table
    windows: of the others
    places:  of every layer of the model
    """

    model: ModelFacts
    facts: ModelFacts
    windows: tuple[Window, ...]
    places: tuple[Place, ...]

    @property
    def tables(self) -> tuple[tuple[int, int], ...]:
        """Of each table but the first: its window, and its number among the groups of that."""
        return tuple((n, i) for n, window in enumerate(self.windows) for i in range(window.num_blocks))

    def layers(self, cache: KVCache) -> tuple[LayerCache, ...]:
        """Every layer of the model as it attends over this cache, whose layers are those of `facts`."""
        pairs = zip(self.places, self.model.layers, strict=True)
        return tuple(replace(cache.layers[place.layer], softmax=layer.softmax) for place, layer in pairs)


def layer_groups(model: ModelFacts, config: EngineConfig) -> LayerGroups:
    """Groups where the model has windows beside full attention, and nothing that is asked for excludes them.

    Raises: InvalidArgumentError if groups are asked for and cannot be had.
    """
    windows = [layer.softmax.window for layer in model.layers]
    together = LayerGroups(model, model, (), tuple(Place(0, n) for n in range(model.num_layers)))
    if not any(windows) or config.disable_hybrid_kv_cache_manager:
        return together
    found = grouping(windows)
    if found is not None and not config.kv_offloading_size:
        return LayerGroups(model, model.of_layers(found.full), found.windows, found.places)
    why_not = f"no layer of {model.name!r} has full attention"
    if found is not None:
        why_not = "with kv_offloading_size blocks have places in host memory, which windows have not"
    if config.disable_hybrid_kv_cache_manager is False:
        raise InvalidArgumentError(
            f"disable_hybrid_kv_cache_manager is False, but {why_not}; leave it out, and all layers share "
            "one block table.",
            field="disable_hybrid_kv_cache_manager",
        )
    logger.warning("layers with sliding windows hold all tokens: %s", why_not)
    return together
