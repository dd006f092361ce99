"""Orders in which cached blocks are reused, found by name."""

from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.eviction.registry import DEFAULT_ORDER, eviction_orders, make_order

__all__ = ["DEFAULT_ORDER", "EvictionOrder", "eviction_orders", "make_order"]
