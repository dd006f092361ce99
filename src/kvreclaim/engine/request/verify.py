"""A request in verify mode: its full cache gives the answer, a compressed one drafts, and a budget follows
the acceptance of the drafts."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field, replace

from kvreclaim import schedule
from kvreclaim.compression.compressor import Compressor

PROBABLE = (0.5, 0.9)
"""Bounds of the three classes of drafts by probability."""
BELIEF_STEP = 0.05
"""Weight of the newest token in the acceptance rates."""
FULL_ROUNDS = 8
"""Rounds without a rejected draft after which an automatic budget falls."""


@dataclass(slots=True, eq=False)
class Verify:
    """Verify mode of a request: its full cache gives the answer, and a compressed cache gives the drafts.

    compressor, footprint: of the companions; num_tokens: most drafts between two verifications
    budgets:  steps of the budget: up when a draft is rejected, down after FULL_ROUNDS without a rejection;
              empty: the budget is fixed
    is_short: the budget has just risen, so companions are chosen anew from the full cache
    beliefs:  recent acceptance rates of drafts by their class of probability (PROBABLE)
    """

    compressor: Compressor
    footprint: schedule.Footprint
    num_tokens: int
    budgets: tuple[int, ...] = ()
    is_short: bool = False
    num_full: int = 0
    beliefs: list[float] = field(default_factory=lambda: [0.85, 0.95, 0.99])
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def eviction_method(self) -> schedule.EvictionMethod:
        return self.compressor.eviction_method

    def belief(self, probability: float) -> float:
        """Return the acceptance rate of drafts with this probability in the compressed cache."""
        return self.beliefs[bisect(PROBABLE, probability)]

    def note(self, probabilities: list[float], accepted: int) -> None:
        """Record a round: the probabilities of its drafts, and the number of accepted ones."""
        drafted = len(probabilities)
        self.num_rounds += 1
        self.num_drafted += drafted
        self.num_accepted += accepted
        for place, probability in enumerate(probabilities[: accepted + 1]):
            kind = bisect(PROBABLE, probability)
            self.beliefs[kind] += BELIEF_STEP * ((place < accepted) - self.beliefs[kind])
        self.num_full = self.num_full + 1 if accepted == drafted else 0
        if accepted < drafted:
            self._step(1)
        elif self.num_full >= FULL_ROUNDS:
            self._step(-1)

    def _step(self, by: int) -> None:
        place = next((i for i, b in enumerate(self.budgets) if b >= self.compressor.config.budget), 0) + by
        if 0 <= place < len(self.budgets):
            size = self.footprint.block_size
            self.compressor = self.compressor.with_budget(self.budgets[place], size)
            self.footprint = replace(self.footprint, budget=self.compressor.budget)
            self.is_short, self.num_full = by > 0, 0
