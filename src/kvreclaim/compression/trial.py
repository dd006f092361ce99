"""Results of candidate policies on a model's held-out documents, and the best policy.

Neither of equal and unequal heads, neither of learned scores and mixtures of queries is right for all models,
so calibration tries them and the statistics file holds what it has found.
"""

from __future__ import annotations

from statistics import mean
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, model_validator

CANDIDATES = (
    "shares(surrogate, floor=0.2)",
    "shares(surrogate)",
    "shares(query_mixture, by=static)",
    "shares(knorm(keep=large), by=static)",
    "query_mixture",
    "triattention",
)
"""Default candidates; of equals the first is taken. The last two keep equal heads: what a server without
unequal ones, or a model without shares, can have. StreamingLLM is not one of them: it keeps no token of the
middle, whatever is asked, yet on a model that answers nothing from a compressed cache it loses the least."""
FRACTIONS = (0.2, 0.1)
"""Fractions of a document that stay."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrialScore(_Frozen):
    """Score of given tokens: nats below certainty, mean over them; share of them it said itself.

    A document goes on (`once`), questions about facts in it are answered (`asked`; None if the full cache
    answers none of them), and stretches of it are said again (`again`; None under a policy with `asked`).
    """

    once: FiniteFloat
    once_right: float = Field(ge=0, le=1)
    again: FiniteFloat | None = None
    again_right: float | None = Field(default=None, ge=0, le=1)
    asked: FiniteFloat | None = None
    asked_right: float | None = Field(default=None, ge=0, le=1)


class TrialOutcome(TrialScore):
    """The same under a policy that keeps a fraction of the document; budget in tokens, mean."""

    policy: str
    fraction: float = Field(gt=0, lt=1)
    budget: float = Field(gt=0)


class Trial(_Frozen):
    """All outcomes beside the full cache's; every policy was tried at every fraction.

    version:   of how documents are cut and what is counted
    documents: held out from everything that was fitted
    questions: about them that the full cache answers
    tokens:    of them, those that stood in the cache when it was compressed
    refused:   candidates that the model, its engine or its statistics cannot serve, and why
    """

    version: Literal[2] = 2
    documents: PositiveInt
    tokens: PositiveInt
    questions: NonNegativeInt = 0
    full: TrialScore
    outcomes: tuple[TrialOutcome, ...] = Field(min_length=1)
    refused: dict[str, str] = {}

    @model_validator(mode="after")
    def _check_grid(self) -> Trial:
        cells = {(outcome.policy, outcome.fraction) for outcome in self.outcomes}
        if len(cells) != len(self.outcomes) or len(cells) != len(self.policies) * len(self.fractions):
            raise ValueError("a trial has one outcome of every policy at every fraction")
        return self

    @property
    def policies(self) -> tuple[str, ...]:
        """In the order in which they were tried."""
        return tuple(dict.fromkeys(outcome.policy for outcome in self.outcomes))

    @property
    def fractions(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(outcome.fraction for outcome in self.outcomes))

    @property
    def reads_back(self) -> bool:
        """Whether the model says what stands in its cache better than what it has not read; one that cannot
        do so with all of the cache is not judged by it."""
        return self.full.again is not None and self.full.again < self.full.once

    @property
    def judged(self) -> Literal["asked", "again"]:
        """What stands for look-ups: answers, or saying again where the full cache answers no question."""
        return "asked" if self.questions else "again"

    def lost(self, outcome: TrialOutcome) -> float:
        """Nats per token against the full cache: going on and, if the model can do it at all, looking up."""
        once = outcome.once - self.full.once
        if not self.questions and not self.reads_back:
            return once
        return once + float(getattr(outcome, self.judged) - getattr(self.full, self.judged))

    def loss(self, policy: str) -> float:
        """The figure that decides: nats per token lost, mean over the fractions."""
        return mean(self.lost(outcome) for outcome in self.outcomes if outcome.policy == policy)

    @property
    def ranked(self) -> tuple[str, ...]:
        """The policies, the one with the smallest loss first; equals in the order of the trial."""
        return tuple(sorted(self.policies, key=self.loss))

    @property
    def best(self) -> str:
        return self.ranked[0]
