"""Which layers of a model share block tables.

A block of the pool holds a block of tokens in every layer with full attention. Layers with sliding windows
beside those are put into groups of as many (the last group maybe of fewer), each with tables of its own over
blocks of the same pool: such a block holds a block of tokens in the layers of one group.

Source: vLLM, v1/core/kv_cache_utils.py (groups of equally many layers over one pool).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import NamedTuple

from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.windows.window import Window
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.kv_cache import KVCache, LayerCache

logger = logging.getLogger(__name__)


class Place(NamedTuple):
    """Where a layer's keys and values lie: in the blocks of a table, there as a layer of the cache. Table 0 is
    that of the layers with full attention; those of the windows' groups follow."""

    table: int
    layer: int


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
    full = tuple(n for n, window in enumerate(windows) if window is None)
    together = LayerGroups(model, model, (), tuple(Place(0, n) for n in range(model.num_layers)))
    if len(full) == len(windows) or config.disable_hybrid_kv_cache_manager:
        return together
    why_not = None
    if not full:
        why_not = f"no layer of {model.name!r} has full attention"
    elif config.kv_offloading_size:
        why_not = "with kv_offloading_size blocks have places in host memory, which windows have not"
    if why_not is None:
        return _grouped(model, full, windows)
    if config.disable_hybrid_kv_cache_manager is False:
        raise InvalidArgumentError(
            f"disable_hybrid_kv_cache_manager is False, but {why_not}; leave it out, and all layers share one "
            "block table.",
            field="disable_hybrid_kv_cache_manager",
        )
    logger.warning("layers with sliding windows hold all tokens: %s", why_not)
    return together


def _grouped(model: ModelFacts, full: tuple[int, ...], windows: list[int | None]) -> LayerGroups:
    places = {layer: Place(0, n) for n, layer in enumerate(full)}
    found: list[Window] = []
    tables = 1
    for window in sorted({window for window in windows if window is not None}):
        members = [n for n, own in enumerate(windows) if own == window]
        for n, layer in enumerate(members):
            places[layer] = Place(tables + n // len(full), n % len(full))
        found.append(Window(window, -(-len(members) // len(full))))
        tables += found[-1].num_blocks
    return LayerGroups(
        model, model.of_layers(full), tuple(found), tuple(places[n] for n in range(model.num_layers))
    )
