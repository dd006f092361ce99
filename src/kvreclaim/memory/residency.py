"""Lifetimes and reuse of a sample of cached blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from math import log1p
from random import Random

from kvreclaim.memory.blocks import SAMPLED

MOST_GAPS = 16
MOST_UNREAD = 8192


@dataclass(frozen=True, slots=True)
class BlockResidency:
    """One cached block from the moment it could be hit until it was reused for something else.

    lifetime_s:          all of that time
    idle_before_evict_s: since the last hit; since the beginning if there was none
    reuse_gaps_s:        between the beginning and the hits, one after another; the last 16
    """

    lifetime_s: float
    idle_before_evict_s: float
    reuse_gaps_s: tuple[float, ...]


@dataclass(slots=True)
class _Life:
    begun: float
    last_used: float
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=MOST_GAPS))


class Residency:
    """Blocks to measure are drawn when they enter the index, with this probability: the number of blocks
    until the next one is drawn at once, so that the others cost one subtraction and no look at the clock.

    Holds at most one life per block of the pool and the last 8,192 results.
    """

    def __init__(self, sample: float, clock: Callable[[], float], marks: bytearray) -> None:
        self._sample, self._clock, self._marks = sample, clock, marks
        self._random = Random(0)
        self.lives: dict[int, _Life] = {}
        """Blocks that are being measured."""
        self.ended: deque[BlockResidency] = deque(maxlen=MOST_UNREAD)
        """Results since the last drain."""
        self.until_next = self._draw()
        """Blocks to enter until one is measured; negative: none ever is. The pool counts it down."""

    def __len__(self) -> int:
        return len(self.lives)

    def begin(self, block: int) -> None:
        """Measure this block, and draw the next one."""
        now = self._clock()
        self.lives[block] = _Life(now, now)
        self._marks[block] |= SAMPLED
        self.until_next = self._draw()

    def use(self, block: int) -> None:
        """Record a hit of a measured block."""
        life, now = self.lives[block], self._clock()
        life.gaps.append(now - life.last_used)
        life.last_used = now

    def end(self, block: int) -> None:
        """Record the reuse of a measured block."""
        life, now = self.lives[block], self._clock()
        self.ended.append(BlockResidency(now - life.begun, now - life.last_used, tuple(life.gaps)))
        self.forget(block)

    def forget(self, block: int) -> None:
        """Drop the record of a measured block that lost its content for another reason."""
        del self.lives[block]
        self._marks[block] &= ~SAMPLED

    def drain(self) -> list[BlockResidency]:
        """Return the results since the last call."""
        ended = list(self.ended)
        self.ended.clear()
        return ended

    def _draw(self) -> int:
        if self._sample <= 0:
            return -1
        if self._sample >= 1:
            return 1
        return 1 + int(log1p(-self._random.random()) / log1p(-self._sample))
