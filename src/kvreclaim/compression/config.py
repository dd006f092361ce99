"""What a caller says about compression; checked at once, then frozen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from kvreclaim.checks import check_choice, require
from kvreclaim.compatibility import Feature, refuse
from kvreclaim.compression.policy import CompressionPolicy, Mode
from kvreclaim.compression.registry import make_policy
from kvreclaim.compression.spec.recall import parse_recall
from kvreclaim.compression.stats import RECALIBRATE, QueryStats
from kvreclaim.config import AUTO, CompressionSettings
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule.budget.footprint import Footprint, budget_in_blocks
from kvreclaim.schedule.budget.recall import Recall

MAX_KEPT: Final = 16
"""Settings whose compressors are kept at a time, the last ones used: callers may invent ever new ones."""
StatsSource = str | os.PathLike[str] | QueryStats


@dataclass(frozen=True)
class CompressionConfig(CompressionSettings):
    """How the KV cache of a sequence is compressed.

    policy:         which tokens stay, as docs/policies.md writes it: "knorm", "segments(snapkv, n=4)";
                    "auto": the best of the trial in the statistics, see resolved
    budget:         tokens kept per layer and KV head by a compression; more than sinks + recent. Where heads
                    keep unequal numbers, whole blocks each, it is rounded (footprint.budget_in_blocks), and
                    RequestMetrics.budget is what was used; "auto", with verify: it begins with the least of
                    config.BUDGETS that there is room in, rises when a draft is refused, and falls when
                    none has been for a while
    interval:       tokens over the budget at which the next compression runs
    sinks:          first tokens of the sequence, never evicted
    recent:         last tokens of the sequence, never evicted
    protect_prompt: prompt tokens go only if there is no other way to keep sinks and recent tokens
    mode:           "union" | "per_head" | "per_layer_head"; None takes the policy's own, the only one where
                    whole blocks go, heads keep unequal numbers or nothing is evicted but reads are sparse
    recall:         "pass" | "tokens:N" | "query": evicted tokens are kept in pages on the host and come back
                    when queries want them (schedule.recall); None: they are gone
    verify:         the compressed cache only drafts; the full one is kept, too, and says the output, which is
                    that of a request without compression: docs/lossless.md
    verify_tokens:  drafted at most between two verifications
    stats:          query statistics or their file (.safetensors, public .pt), for policies that need
                    them; policies that need none do not read it
    options:        the policy's own parameters; an unknown one is an error

    With policy "full" nothing is evicted: the other fields are checked but have no effect. Policies that
    read sparsely evict nothing either: budget, sinks and recent say which tokens are read, the other fields
    have no effect.
    Comparable and hashable; QueryStats objects compare by identity.
    Raises: InvalidArgumentError.
    """

    stats: StatsSource | None = None
    options: Mapping[str, object] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mode is not None:
            check_choice("mode", self.mode, Mode)
            object.__setattr__(self, "mode", Mode(self.mode))
        if not (self.stats is None or isinstance(self.stats, str | os.PathLike | QueryStats)):
            raise InvalidArgumentError(
                f"stats is {self.stats!r}; it must be a file of `kvreclaim calibrate` or QueryStats."
            )
        if not isinstance(self.options, Mapping):
            raise InvalidArgumentError(f"options is {self.options!r}; it must map option names to values.")
        object.__setattr__(self, "options", dict(self.options))
        recall = self.recalled
        require(
            recall is None or self.mode in (None, Mode.PER_LAYER_HEAD),
            f"mode is {self.mode!r}, but under recall each KV head holds its own tokens; leave mode, or "
            "recall, out.",
            "recall",
        )
        if recall is not None:
            on = {Feature.VERIFY: self.verify, Feature.PROTECT_PROMPT: self.protect_prompt}
            refuse({Feature.RECALL: repr(recall.mode)} | {each: "" for each, is_on in on.items() if is_on})
        if self.policy == AUTO:
            require(not self.options, "options belong to a policy, and policy is 'auto'; name one, or none.")
            return
        policy = self.make_policy()
        if policy.eviction_method.fixes_mode and self.mode not in (None, policy.default_mode):
            raise InvalidArgumentError(
                f"mode is {self.mode!r}, but policy {policy.name} decides itself who shares a kept set; "
                "leave mode out."
            )

    @property
    def recalled(self) -> Recall | None:
        """How evicted tokens come back; None: they do not."""
        return None if self.recall is None else parse_recall(self.recall)

    def resolved(self, stats: QueryStats | None, whose: str) -> CompressionConfig:
        """With a policy that has a name of its own in the place of "auto"; itself otherwise.

        stats: of the model; whose: what an error calls it

        Raises: InvalidArgumentError where nothing says which policy is best.
        """
        if self.policy != AUTO:
            return self
        trial = None if stats is None else stats.metadata.trial
        if trial is None:
            lack = "there are no statistics" if stats is None else "the statistics hold no trial"
            raise InvalidArgumentError(
                f"policy auto is what calibration finds best, and {lack} of {whose}; {RECALIBRATE}, "
                "or name a policy, such as streaming_llm."
            )
        return replace(self, policy=trial.best)

    def make_policy(self) -> CompressionPolicy:
        """The policy with its options. Raises: InvalidArgumentError for "auto", which must be resolved."""
        return make_policy(self.policy, self.options)

    def in_blocks(self, block_size: int) -> CompressionConfig:
        """The same with the budget that blocks of this size serve, where heads keep unequal numbers."""
        if not self.make_policy().eviction_method.uneven:
            return self
        budget = budget_in_blocks(self.budget, block_size, self.sinks + self.recent)
        return self if budget == self.budget else replace(self, budget=budget)

    def footprint(self, plain: Footprint) -> Footprint:
        """The footprint of a sequence compressed so; `plain` is that of one that is not."""
        policy = self.make_policy()
        return replace(
            plain,
            eviction_method=policy.eviction_method,
            budget=self.budget,
            interval=self.interval,
            prompt_only=policy.prompt_only,
            sinks=self.sinks,
            recent=self.recent,
            protect_prompt=self.protect_prompt,
            recall=self.recalled,
        )
