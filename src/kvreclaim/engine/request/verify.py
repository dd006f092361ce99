"""A request in verify mode: how it drafts, and how its budget follows what is accepted."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field, replace

from kvreclaim import schedule
from kvreclaim.compression.compressor import Compressor

PROBABLE = (0.5, 0.9)
"""Drafts are told apart by how probable they are: below, between and above these."""
BELIEF_STEP = 0.05
"""Weight of the newest token in how often drafts are accepted."""
FULL_ROUNDS = 8
"""Rounds without a refused draft after which a budget that chooses itself falls."""


@dataclass(slots=True, eq=False)
class Verify:
    """A request whose answer is that of its full cache, and whose drafts come from a compressed one.

    compressor, footprint: of the companions; num_tokens: drafted at most between two verifications
    budgets:  steps that the budget takes: up when a draft is refused, down after FULL_ROUNDS in which none
              was; empty: it stays
    is_short: the budget has just risen: companions are to be chosen anew from the full cache
    beliefs:  how often drafts have been accepted lately, by how probable they were (PROBABLE)
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
        """In a draft that the compressed cache holds so probable."""
        return self.beliefs[bisect(PROBABLE, probability)]

    def note(self, probabilities: list[float], accepted: int) -> None:
        """A round: drafts that were so probable, and how many of them were accepted."""
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
