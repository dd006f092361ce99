"""A request in verify mode: its full cache gives the answer, a compressed one drafts, and a budget follows
the acceptance of the drafts."""

from __future__ import annotations

from bisect import bisect
from dataclasses import dataclass, field, replace

from kvreclaim import schedule
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression_settings import BUDGETS
from kvreclaim.config import EngineConfig
from kvreclaim.engine.request.spec import footprint_of
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.schedule.budget.footprint import check_blocks

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


def divided(compressor: Compressor | None) -> tuple[Compressor | None, Compressor | None]:
    """Split into the compressor that drafts and the one that compresses the request: one of them is None."""
    if compressor is not None and compressor.config.verify:
        return compressor, None
    return None, compressor


def verify_of(
    drafting: Compressor,
    groups: LayerGroups,
    config: EngineConfig,
    prompt: list[int],
    num_tokens: int,
) -> Verify:
    """Return the settings of verify mode for a request. num_tokens: most tokens it will have. Raises:
    InvalidArgumentError."""
    footprint = footprint_of(drafting, config, prompt, groups)
    check_blocks(footprint, drafting.policy.name)
    return Verify(drafting, footprint, drafting.config.verify_tokens, budgets_of(drafting, num_tokens))


def budgets_of(compressor: Compressor, num_tokens: int) -> tuple[int, ...]:
    """Return the steps of an automatic budget, up to the first that holds num_tokens; none for a fixed
    budget."""
    config = compressor.config
    if not config.auto_budget:
        return ()
    first = next((i for i, b in enumerate(BUDGETS) if b >= num_tokens), len(BUDGETS))
    return tuple(b for b in BUDGETS[: first + 1] if b >= config.budget)
