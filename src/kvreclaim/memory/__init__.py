"""Who owns which block: ids, reference counts, prefix index, block tables, lengths. Integers only."""

from kvreclaim.memory.block_table import BlockTable
from kvreclaim.memory.manager import Growth, MemoryManager
from kvreclaim.memory.pool import BlockPool
from kvreclaim.memory.prefix_match import PrefixMatch
from kvreclaim.memory.shrink import ShrinkPlan, Shrunk
from kvreclaim.memory.stats import MemoryStats

__all__ = [
    "BlockPool",
    "BlockTable",
    "Growth",
    "MemoryManager",
    "MemoryStats",
    "PrefixMatch",
    "ShrinkPlan",
    "Shrunk",
]
