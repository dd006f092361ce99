"""Results of candidate policies on a model's held-out documents, and the best policy.

No choice between equal and unequal heads, or learned scores and query mixtures, is right for all models, so
calibration tries them and stores the results in the statistics file.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from math import log
from statistics import mean
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, NonNegativeInt, PositiveInt, model_validator

from kvreclaim.compression_settings import AUTO

CANDIDATES = (
    "shares(surrogate, floor=0.02)",
    "shares(query_mixture, by=static)",
    "shares(knorm(keep=large), by=static)",
    "query_mixture",
    "triattention",
)
"""Default candidates; ties take the first. The last two keep equal heads, for servers without unequal ones
and models without shares. A surrogate without a floor is left out: on a dozen questions it wins or loses by
chance, on RULER it is behind (docs/log.md). So is StreamingLLM: it keeps no token of the middle for any
question, yet on a model that answers nothing from a compressed cache it loses the least."""
FRACTIONS = (0.2, 0.1)
"""Fractions of a document that stay."""


FORMATS = ("auto", "int8", "int8+int4", "int4")
"""KV cache dtypes that are tried with the best policy; auto: the model's own."""
SHARES = (0.2, 0.1, 0.05)
"""Shares of the full cache's bytes in the model's dtype in which they are tried."""


class _Frozen(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TrialScore(_Frozen):
    """Mean nats below certainty of given tokens, and the share of greedily predicted ones.
    once:  the document's continuation
    asked: answers to questions about its facts; None if the full cache answers none of them
    again: repeated stretches of it; None under a policy with `asked`
    """

    once: FiniteFloat
    once_right: float = Field(ge=0, le=1)
    again: FiniteFloat | None = None
    again_right: float | None = Field(default=None, ge=0, le=1)
    asked: FiniteFloat | None = None
    asked_right: float | None = Field(default=None, ge=0, le=1)


class TrialOutcome(TrialScore):
    """Score under a policy that keeps a fraction of the document. budget: mean, in tokens"""

    policy: str
    fraction: float = Field(gt=0, lt=1)
    budget: float = Field(gt=0)


class FormatOutcome(TrialScore):
    """Score under the best policy in another KV cache dtype. share: of the full cache's bytes in the model's
    dtype; budget: mean, in tokens"""

    kv_cache_dtype: str
    share: float = Field(gt=0, lt=1)
    budget: float = Field(gt=0)


class Trial(_Frozen):
    """Outcomes of every policy at every fraction, and the full cache's score.

    version:   version of the documents' layout and of the scores
    documents: number of held-out documents
    questions: number of questions that the full cache answers
    tokens:    tokens in the cache at compression
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
        """Policies in the order of the trial."""
        return tuple(dict.fromkeys(outcome.policy for outcome in self.outcomes))

    @property
    def fractions(self) -> tuple[float, ...]:
        return tuple(dict.fromkeys(outcome.fraction for outcome in self.outcomes))

    @property
    def reads_back(self) -> bool:
        """Whether the model predicts cached text better than new text. If it does not with the full cache,
        repetitions do not count."""
        return self.full.again is not None and self.full.again < self.full.once

    @property
    def judged(self) -> Literal["asked", "again"]:
        """Score used for look-ups: answers, or repetitions if the full cache answers no question."""
        return "asked" if self.questions else "again"

    def lost(self, outcome: TrialScore) -> float:
        """Loss in nats per token against the full cache: continuation and, if possible, look-ups."""
        once = outcome.once - self.full.once
        if not self.questions and not self.reads_back:
            return once
        return once + float(getattr(outcome, self.judged) - getattr(self.full, self.judged))

    def loss(self, policy: str) -> float:
        """Return the figure of merit: nats per token lost, mean over the fractions."""
        return mean(self.lost(outcome) for outcome in self.outcomes if outcome.policy == policy)

    @property
    def ranked(self) -> tuple[str, ...]:
        """Policies by ascending loss; ties in the order of the trial."""
        return tuple(sorted(self.policies, key=self.loss))

    @property
    def best(self) -> str:
        return self.ranked[0]

    def format_at(self, share: float) -> str | None:
        """Return the KV cache dtype with the least loss at the measured share with the nearest logarithm;
        None if formats were not tried."""
        if not self.formats:
            return None
        nearest = self.measured_share(share)
        return min((own for own in self.formats if own.share == nearest), key=self.lost).kv_cache_dtype

    def measured_share(self, share: float) -> float:
        """Return the share at which formats were tried with the nearest logarithm."""
        return min((outcome.share for outcome in self.formats), key=lambda own: abs(log(own / share)))

    def whole_format_at(self, share: float, densities: Mapping[str, Fraction]) -> str | None:
        """Return the widest KV cache dtype in which a full cache fits in the share; None if there is none, or
        only dtypes narrower than that of format_at, which lost more than it at the measured share.

        densities: KVBytes.density of each dtype of `formats`
        """
        least = densities[self.format_at(share) or AUTO]
        fit = [form for form, own in densities.items() if own * Fraction(str(share)) >= 1 and own <= least]
        return min(fit, key=densities.__getitem__, default=None)
