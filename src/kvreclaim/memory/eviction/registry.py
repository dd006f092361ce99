"""From the name of an eviction order to the order."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.eviction.base import EvictionOrder
from kvreclaim.memory.eviction.gdsf import GDSF
from kvreclaim.memory.eviction.lfu import LFU
from kvreclaim.memory.eviction.lru import LRU
from kvreclaim.memory.eviction.priority import Priority
from kvreclaim.memory.eviction.slru import SLRU

DEFAULT_ORDER = LRU.name
_KNOWN: Mapping[str, type[EvictionOrder]] = MappingProxyType(
    {cls.name: cls for cls in (LRU, SLRU, LFU, Priority, GDSF)}
)


def eviction_orders() -> tuple[str, ...]:
    """The known names, the default first."""
    return tuple(_KNOWN)


def make_order(name: str, num_blocks: int, block_size: int) -> EvictionOrder:
    """An order of this many blocks, all of them queued.

    Raises: InvalidArgumentError for a name that is not known.
    """
    if name not in _KNOWN:
        raise InvalidArgumentError(
            f"eviction_policy is {name!r}, which is unknown; known are {', '.join(_KNOWN)}."
        )
    return _KNOWN[name](num_blocks, block_size)
