"""The chunks that a prompt reuses, and the tokens of it that are recomputed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvreclaim.memory.prefix.index import BlockKeys


@dataclass(frozen=True, slots=True, eq=False)
class ReusedChunk:
    """A chunk at positions start .. stop - 1 of a prompt.

    lead: leading tokens of the prompt that preceded the chunk when it was computed
    keys: block keys of these and the chunk
    """

    start: int
    stop: int
    lead: int
    keys: BlockKeys

    @property
    def origin(self) -> int:
        """The prompt position that corresponds to the first token of `keys`."""
        return self.start - self.lead


@dataclass(slots=True, eq=False)
class Reuse:
    """Chunks that one prompt reuses. sources: its chunks, in order; anew: [num_prompt] bool, tokens that are
    computed; num_gone: of these, tokens to be reused that had left the cache.

    scores: [num_prompt] fp32 attention from the tokens after the last chunk in `layers`, for prompts that
            measure reuse; None otherwise
    """

    sources: tuple[ReusedChunk, ...]
    anew: np.ndarray
    scores: np.ndarray | None = None
    layers: range = range(0)
    num_gone: int = 0

    @property
    def asked_from(self) -> int:
        """The first token after the last chunk."""
        return self.sources[-1].stop

    @property
    def offsets(self) -> np.ndarray:
        """[num_prompt] int64: positions of tokens within their chunks; 0 outside of chunks."""
        found = np.zeros(len(self.anew), dtype=np.int64)
        for source in self.sources:
            found[source.start : source.stop] = np.arange(source.stop - source.start)
        return found
