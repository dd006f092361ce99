"""Ownership of blocks: ids, reference counts, prefix index, tables, lengths. Integers only."""

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.changes import CompactionPlan, Growth, Shrunk, TableState
from kvreclaim.memory.eviction import EvictionOrder, eviction_orders, make_order
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.pins import Retention
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix.index import MISS_REASONS, BlockKeys
from kvreclaim.memory.prefix_cache import PrefixMatch
from kvreclaim.memory.stats import MemoryStats

__all__ = [
    "MISS_REASONS",
    "BlockKeys",
    "BlockPool",
    "BlockTable",
    "CompactionPlan",
    "EvictionOrder",
    "Growth",
    "MemoryManager",
    "MemoryStats",
    "PrefixMatch",
    "Retention",
    "Shrunk",
    "TableState",
    "eviction_orders",
    "make_order",
]
