"""Compression settings of a request; checked at once, then frozen."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Final

from kvreclaim.checks import check_choice, require
from kvreclaim.compression.loss_curve import LossCurve
from kvreclaim.compression.policy import CompressionPolicy, Mode
from kvreclaim.compression.registry import make_policy, object_spec, policy_spec
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.stats_metadata import RECALIBRATE
from kvreclaim.compression_settings import AUTO, FULL, CompressionSettings
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.options import settings_of
from kvreclaim.refusals import Feature, refuse
from kvreclaim.schedule.budget.footprint import (
    SAME,
    Footprint,
    budget_in_blocks,
    share_in_blocks,
    sinks_in_blocks,
)

logger = logging.getLogger(__name__)

MAX_KEPT: Final = 16
"""Compressors kept at a time, by settings, the last ones used; callers may send ever new settings."""
StatsSource = str | os.PathLike[str] | QueryStats


@dataclass(frozen=True)
class CompressionConfig(CompressionSettings):
    """Compression settings of one sequence.

    policy:         which tokens stay, in the syntax of docs/policies.md: "knorm", "segments(snapkv, n=4)";
                    "auto": the best policy of the trial in the statistics (see resolved); or a
                    CompressionPolicy, which the field then holds as text
    budget:         tokens that a compression leaves per layer and KV head; more than sinks + recent. If heads
                    keep unequal numbers, it is the average, rounded to blocks (footprint.budget_in_blocks);
                    RequestMetrics.budget is the one used. "auto" (with verify): starts with the smallest of
                    BUDGETS that fits, rises when a draft is rejected, falls after a while without rejections
                    0.2 or "20%" is a share of the bytes that the prompt takes in the model's dtype (see
                    for_prompt)
    max_loss:       instead of a budget: that of the loss curve in the statistics (see promised)
    content:        kind of the prompt, one of CONTENTS; None: the kind that needs the larger budget
    interval:       tokens over the budget at which the next compression runs
    sinks:          first tokens of the sequence, never evicted
    recent:         last tokens of the sequence, never evicted
    protect_prompt: evict prompt tokens only if nothing else but sinks and recent tokens is left
    protect_system: a chat's system prompt and tools are sinks, too (see protecting)
    mode:           "union" | "per_head" | "per_layer_head"; None takes the policy's own. Policies that evict
                    whole blocks, keep unequal numbers or read sparsely accept no other
    verify:         the compressed cache only drafts; the full cache is kept and verifies, so the output is
                    that of a request without compression (docs/lossless.md)
    verify_tokens:  most drafts between two verifications
    stats:          query statistics or their .safetensors file; read only by policies that need them
    options:        the policy's own parameters; an unknown one is an error

    With policy "full" nothing is evicted; the other fields are checked but have no effect. Policies that read
    sparsely evict nothing either: budget, sinks and recent choose the tokens that are read, the other fields
    have no effect.
    Comparable and hashable; QueryStats objects compare by identity.
    Raises: InvalidArgumentError.
    """

    stats: StatsSource | None = None
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    policy_object: CompressionPolicy | None = field(default=None, kw_only=True, repr=False)
    """The policy that was passed as an object, if its text does not name it; set by `policy`."""

    def __post_init__(self) -> None:
        self._take_policy()
        super().__post_init__()
        if self.mode is not None:
            check_choice("mode", self.mode, Mode)
            object.__setattr__(self, "mode", Mode(self.mode))
        if not (self.stats is None or isinstance(self.stats, str | os.PathLike | QueryStats)):
            raise InvalidArgumentError(
                f"stats is {self.stats!r}; pass a file of `kvreclaim calibrate` or QueryStats."
            )
        if not isinstance(self.options, Mapping):
            raise InvalidArgumentError(
                f"options is {self.options!r}; pass a mapping of option names to values."
            )
        object.__setattr__(self, "options", dict(self.options))
        refuse(
            {
                Feature.MAX_LOSS: self.max_loss,
                Feature.POLICY_OPTIONS: bool(self.options),
                Feature.AUTO_POLICY: self.policy == AUTO,
            }
        )
        if self.policy == AUTO:
            return
        policy = self.make_policy()
        if policy.eviction_method.fixes_mode and self.mode not in (None, policy.default_mode):
            raise InvalidArgumentError(
                f"mode is {self.mode!r}, but policy {policy.name} decides itself who shares a kept set; "
                "leave mode out."
            )

    def _take_policy(self) -> None:
        """Store a policy object's text, and the object if its text does not rebuild an equal one."""
        given: object = self.policy
        if isinstance(given, CompressionPolicy):
            text, kept = object_spec(given)
            require(
                not self.options,
                f"options go with a policy as text, and policy is the object {given!r}; set its fields.",
                "options",
            )
            object.__setattr__(self, "policy", text)
            object.__setattr__(self, "policy_object", kept)
        elif isinstance(given, type):
            raise InvalidArgumentError(
                f"policy is the class {given.__name__}; pass an object of it, such as {given.__name__}().",
                field="policy",
            )
        elif self.policy_object is not None and policy_spec(self.policy_object) != given:
            object.__setattr__(self, "policy_object", None)  # replaced by another policy

    def resolved(self, stats: QueryStats | None, model: str) -> CompressionConfig:
        """Replace "auto" by the policy that the statistics name; other configs are returned unchanged.

        stats: the model's statistics; model: its name in errors

        Raises: InvalidArgumentError if there are no statistics, or they hold no trial.
        """
        if self.policy != AUTO:
            return self
        trial = None if stats is None else stats.metadata.trial
        if trial is None:
            lack = "there are no statistics" if stats is None else "the statistics hold no trial"
            start = ", start with --kv-compression-calibrate" if stats is None else ""
            raise InvalidArgumentError(
                f"policy auto is what calibration finds best, and {lack} of {model}; {RECALIBRATE}{start}, "
                "or name a policy, such as streaming_llm."
            )
        return replace(self, policy=trial.best)

    def promised(
        self, curve: LossCurve, kv_cache_dtype: str, num_tokens: int, block_size: int
    ) -> CompressionConfig:
        """Replace max_loss by the budget that keeps a prompt of this length within it, in whole blocks, or by
        policy "full" if no budget does. Without max_loss, return the config.

        Raises: InvalidArgumentError if the curve is of another policy; errors of LossCurve.promised.
        """
        if self.max_loss is None:
            return self
        require(
            self.policy == curve.policy,
            f"policy is {self.policy!r}, but the loss was measured under {curve.policy!r}; leave policy out, "
            "or give a budget instead of max_loss.",
            "policy",
        )
        budget = curve.promised(kv_cache_dtype, self.max_loss, num_tokens, self.content)
        if budget is None:
            logger.info("max_loss %g: a prompt of %d tokens keeps them all", self.max_loss, num_tokens)
            return replace(self, policy=FULL, max_loss=None, content=None)
        budget = blocks_for(budget, block_size) * block_size
        sinks = min(self.sinks, settings_of(CompressionSettings)["sinks"].default)
        found = replace(self, budget=budget, sinks=sinks, max_loss=None, content=None)
        return found if sinks == self.sinks else found._covering(self.sinks, block_size)

    def for_prompt(self, num_tokens: int, block_size: int, density: Fraction = SAME) -> CompressionConfig:
        """Convert a budget given as a share of the prompt's bytes into tokens, in whole blocks: at least one
        more than sinks and recent tokens take. Other budgets do not change.

        density: KVBytes.density of the cache's format
        """
        if self.budget_share is None:
            return self
        sinks = min(self.sinks, settings_of(CompressionSettings)["sinks"].default)
        budget = share_in_blocks(self.budget_share, num_tokens, block_size, sinks + self.recent, density)
        found = replace(self, budget=budget, sinks=sinks)
        return found if sinks == self.sinks else found._covering(self.sinks, block_size)

    def protecting(self, num_tokens: int, block_size: int) -> CompressionConfig:
        """Extend the sinks to cover the first num_tokens of a prompt, its system prompt and tools, in whole
        blocks, up to half of the budget that recent tokens leave.

        Returns the config unchanged with protect_system off, and with verify, which is lossless.
        """
        if not self.protect_system or self.verify:
            return self
        return self._covering(num_tokens, block_size)

    def _covering(self, num_tokens: int, block_size: int) -> CompressionConfig:
        sinks = sinks_in_blocks(num_tokens, self.budget - self.recent, block_size)
        if max(sinks, self.sinks) < num_tokens:
            text = (
                "%d of %d tokens of system prompt and tools are protected; more are over half of the budget"
            )
            logger.info(text, max(sinks, self.sinks), num_tokens)
        return self if sinks <= self.sinks else replace(self, sinks=sinks)

    def make_policy(self) -> CompressionPolicy:
        """Build the policy with its options. Raises: InvalidArgumentError for an unresolved "auto"."""
        if self.policy_object is not None:
            return self.policy_object
        return make_policy(self.policy, self.options)

    def in_blocks(self, block_size: int) -> CompressionConfig:
        """Round the budget to blocks of this size, if heads keep unequal numbers."""
        if self.is_of_prompt or not self.make_policy().eviction_method.uneven:
            return self
        budget = budget_in_blocks(self.budget, block_size, self.sinks + self.recent)
        return self if budget == self.budget else replace(self, budget=budget)

    def footprint(self, plain: Footprint) -> Footprint:
        """Return the footprint of a sequence with this compression; `plain`: without compression."""
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
        )
