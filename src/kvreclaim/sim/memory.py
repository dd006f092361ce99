"""The memory manager of a simulation: the engine's own, whose blocks are found by a trace's ids."""

from __future__ import annotations

from typing import Any

from kvreclaim.memory.manager import MemoryManager
from kvreclaim.sim.content import Links, TraceKeys, TraceTokens


class TraceMemory(MemoryManager):
    """Block by block. links: of the trace."""

    def __init__(self, num_blocks: int, block_size: int, links: Links, **others: Any) -> None:
        super().__init__(num_blocks, block_size, **others)
        self._links = links

    def keys(self, token_ids: Any, cache_salt: str | None = None, *, lasting: bool = True) -> TraceKeys:
        assert isinstance(token_ids, TraceTokens), f"{type(token_ids).__name__} are no tokens of a trace"
        return TraceKeys(self._links, token_ids)

    def follows_itself(self, seq_id: int) -> bool:
        keys = self.table(seq_id).keys
        assert isinstance(keys, TraceKeys), f"sequence {seq_id} is of no trace"
        return keys.has_own_tail and super().follows_itself(seq_id)
