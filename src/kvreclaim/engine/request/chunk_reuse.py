"""Which chunks a prompt reuses, and which of its tokens are computed anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kvreclaim.memory.prefix.keys import BlockKeys


@dataclass(frozen=True, slots=True, eq=False)
class ReusedChunk:
    """A chunk that stands at start .. stop - 1 of a prompt.

    lead: tokens of the prompt's beginning behind which it was computed
    keys: of these and the chunk
    """

    start: int
    stop: int
    lead: int
    keys: BlockKeys

    @property
    def origin(self) -> int:
        """The place in the prompt where its keys' first token would stand."""
        return self.start - self.lead


@dataclass(slots=True, eq=False)
class Reuse:
    """Chunks that one prompt reuses. sources: its chunks, in order; anew: [num_prompt] bool, tokens that are
    computed; num_gone: of these, those whose keys and values had left the cache when they were to be reused.

    scores: [num_prompt] fp32 attention that the tokens of a prompt whose reuse is only tried get from those
            behind the last chunk, in `layers`; None where nobody asks
    """

    sources: tuple[ReusedChunk, ...]
    anew: np.ndarray
    scores: np.ndarray | None = None
    layers: range = range(0)
    num_gone: int = 0

    @property
    def asked_from(self) -> int:
        """The first token behind the last chunk."""
        return self.sources[-1].stop

    @property
    def offsets(self) -> np.ndarray:
        """[num_prompt] int64: places of tokens within their chunks; elsewhere 0."""
        found = np.zeros(len(self.anew), dtype=np.int64)
        for source in self.sources:
            found[source.start : source.stop] = np.arange(source.stop - source.start)
        return found
