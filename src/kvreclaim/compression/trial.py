"""Results of candidate policies on a model's held-out documents, and the best policy.

Neither of equal and unequal heads, neither of learned scores and mixtures of queries is right for all models,
so calibration tries them and the statistics file holds what it has found.
"""

from __future__ import annotations

from math import log
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


FORMATS = ("auto", "int8", "int8+int4", "int4")
"""KV cache dtypes that are tried with the best policy; auto: the model's own."""
SHARES = (0.2, 0.1, 0.05)
"""Shares of the full cache's bytes in the model's dtype in which they are tried."""


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


class FormatOutcome(TrialScore):
    """The same under the best policy over a cache in another KV cache dtype; share of the bytes of the full
    cache in the model's dtype, budget in tokens, mean."""

    kv_cache_dtype: str
    share: float = Field(gt=0, lt=1)
    budget: float = Field(gt=0)


class Trial(_Frozen):
    """All outcomes beside the full cache's; every policy was tried at every fraction.

    version:   of how documents are cut and what is counted
    documents: held out from everything that was fitted
    questions: about them that the full cache answers
    tokens:    of them, those that stood in the cache when it was compressed
    refused:   candidates that the model, its engine or its statistics cannot serve, and why
    formats:   of the best policy, at equal bytes; empty: none were tried
    """

    version: Literal[2] = 2
    documents: PositiveInt
    tokens: PositiveInt
    questions: NonNegativeInt = 0
    full: TrialScore
    outcomes: tuple[TrialOutcome, ...] = Field(min_length=1)
    refused: dict[str, str] = {}
    formats: tuple[FormatOutcome, ...] = ()

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

    def lost(self, outcome: TrialScore) -> float:
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

    def format_at(self, share: float) -> str | None:
        """The KV cache dtype that lost least at the measured share that is nearest to this one by its
        logarithm; None: formats were not tried."""
        if not self.formats:
            return None
        nearest = min((outcome.share for outcome in self.formats), key=lambda own: abs(log(own / share)))
        return min((own for own in self.formats if own.share == nearest), key=self.lost).kv_cache_dtype
