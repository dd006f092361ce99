"""The KV cache dtype that a trial found best for a budget in bytes."""

from __future__ import annotations

import logging
from dataclasses import replace

from kvreclaim.compression.config import CompressionConfig, StatsSource
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression_settings import AUTO
from kvreclaim.config import EngineConfig

logger = logging.getLogger(__name__)


def in_best_format(
    config: EngineConfig, compression: CompressionConfig | None, stats: StatsSource | None
) -> EngineConfig:
    """The config with the KV cache dtype that lost least in the trial at the share of bytes that
    `compression` keeps, if policy and kv_cache_dtype are both left to choose and the trial has tried several.

    Raises: InvalidArgumentError, StatsMismatchError for statistics that cannot be read.
    """
    if compression is None or stats is None or config.kv_cache_dtype != AUTO:
        return config
    if compression.policy != AUTO or compression.budget_share is None:
        return config
    trial = (stats if isinstance(stats, QueryStats) else QueryStats.load(stats)).metadata.trial
    form = None if trial is None else trial.format_at(compression.budget_share)
    if form is None or form == AUTO:
        return config
    text = "kv_cache_dtype is %s, which lost least in the trial at %g%% of the bytes; name one to keep it"
    logger.info(text, form, 100 * compression.budget_share)
    return replace(config, kv_cache_dtype=form)
