"""Orders in which cached blocks are reused, by name. Third parties add theirs as entry points of the group
`kvreclaim.eviction_orders`; a built-in name cannot be taken over."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvreclaim.entry_points import find, names
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.eviction.lru import LRU
from kvreclaim.memory.eviction.priority import Priority
from kvreclaim.memory.eviction.slru import SLRU

ENTRY_POINT_GROUP = "kvreclaim.eviction_orders"
__all__ = ["DEFAULT_ORDER", "EvictionOrder", "eviction_orders", "make_order"]
DEFAULT_ORDER = LRU.name
_BUILT_IN: Mapping[str, type[EvictionOrder]] = MappingProxyType(
    {cls.name: cls for cls in (LRU, SLRU, Priority)}
)


def eviction_orders() -> tuple[str, ...]:
    """Return the built-in names, the default first, then those of third parties in alphabetical order."""
    return names(_BUILT_IN, ENTRY_POINT_GROUP)


def make_order(name: str, num_blocks: int) -> EvictionOrder:
    """Make an order of this many blocks, all of them queued.

    Raises: InvalidArgumentError for an unknown name, or an entry point of no eviction order.
    """
    cls = find(_BUILT_IN, ENTRY_POINT_GROUP, name, "eviction order", EvictionOrder, is_data=False)
    if cls is None:
        raise InvalidArgumentError(
            f"eviction_policy is {name!r}, which is unknown; known are {', '.join(eviction_orders())}."
        )
    return cls(num_blocks)
