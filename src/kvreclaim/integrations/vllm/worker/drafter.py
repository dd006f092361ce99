"""Passes over a drafter's own layers.

They share the target's block tables, so a pass keeps equally many of their tokens, in the same blocks. The
choice depends on the drafter's own keys, because its layers and heads do not correspond to the target's. It
changes how many drafts are accepted, never the answer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.refusals import STATISTICS
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.applier import Applier, RunnerRows
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.facts import ModelFacts

POLICY = "lagkv"
"""For a drafter where the target's policy has statistics, which are the target's, or unequal heads."""
logger = logging.getLogger("vllm.kvreclaim")


def drafter_settings(settings: CompressionConfig) -> CompressionConfig:
    """A request's settings for the layers of a drafter."""
    policy = settings.make_policy()
    if policy.eviction_method.equal_heads and not policy.needs & STATISTICS:
        return settings
    return replace(settings, policy=POLICY, options={}, mode=None)


@dataclass(frozen=True, slots=True, eq=False)
class SharedRows:
    """Tables that the target's applier changes."""

    rows: RunnerRows

    @property
    def num_shifted(self) -> int:
        return self.rows.num_shifted

    def rewrite(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        """Leave it to the target's."""

    def forget(self, request_ids: Iterable[str]) -> None:
        """Leave it to the target's."""


class DrafterApplier(Applier):
    """Carries out the scheduler's passes on the drafter's layers, each step before the target's applier.

    Args:
        options: of the engine
        facts:   of the drafter's heads on this worker
        views:   the caches of its layers
        rows:    the target's
    """

    def __init__(self, options: Options, facts: ModelFacts, views: CacheViews, rows: RunnerRows) -> None:
        super().__init__(options, facts, None, views, SharedRows(rows))

    def _compressor(self, settings: CompressionConfig) -> Compressor:
        return super()._compressor(drafter_settings(settings))

    def _warn(self, request_id: str) -> None:
        logger.warning("request %s: the drafter's keys scored NaN, so its drafts are poor.", request_id)


class DraftedApplier(Applier):
    """The target's applier, together with the drafter's. The drafter's uses the rows of the target's to
    forget requests, so it is called first in a step."""

    def __init__(self, drafter: DrafterApplier, *args: Any) -> None:
        super().__init__(*args)
        self.drafter = drafter

    def begin(self, scheduler_output: Any) -> None:
        self.drafter.begin(scheduler_output)
        super().begin(scheduler_output)

    def take_seconds(self) -> float | None:
        """Return the seconds of both appliers."""
        own, drafters = super().take_seconds(), self.drafter.take_seconds()
        self.figures.seconds += drafters or 0.0
        return drafters if own is None else own + (drafters or 0.0)
