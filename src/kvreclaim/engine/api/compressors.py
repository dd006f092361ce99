"""Settings of the compression bound to the model, with the query statistics that they need."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from threading import Lock, RLock

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import MAX_KEPT, CompressionConfig, StatsSource
from kvreclaim.compression.loss_curve import MEASURE_CURVE
from kvreclaim.compression.refusals import STATISTICS, format_features, policy_features
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression_settings import AUTO
from kvreclaim.config import EngineConfig
from kvreclaim.engine.api.kept_statistics import stats_source
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import KVFormat, plain_format
from kvreclaim.refusals import refuse
from kvreclaim.refusals.max_loss import ENGINE_MEASURED, refuse_chunk, refuse_unmeasured

logger = logging.getLogger(__name__)

DEFAULT_CHUNK = EngineConfig().max_num_batched_tokens
"""Chunk size with which loss curves are measured."""
FEW_TOKENS = 200
"""Tokens per head below which policy auto warns: SmolLM2-135M loses a third at 102 (docs/evidence.md)."""


class Compressors:
    """One compressor per setting. A file of statistics is read once for all settings, and is on the model's
    device once. Methods may be called from any thread.

    stats_file: for settings that name none; it need not exist
    backend:   see Compressor
    kv_format: of the engine's cache
    engine:    its options, as given
    """

    def __init__(
        self,
        facts: ModelFacts,
        stats_file: Path,
        backend: Backend,
        kv_format: KVFormat,
        engine: EngineConfig,
    ) -> None:
        self._facts = facts
        self._kv_format = kv_format
        self._engine, self._block_size = engine, engine.block_size
        self._stats_file = stats_file
        self._backend = backend
        own = plain_format(facts.dtype)
        self.density, self._kv_cache_dtype = kv_format.density(own, facts.layers), kv_format.dtype_name(own)
        self._kept: dict[CompressionConfig, Compressor] = {}
        self._stats: dict[str, QueryStats] = {}
        self._has_warned = False
        self._making, self._looking = RLock(), Lock()

    def kept(self, config: CompressionConfig) -> Compressor | None:
        """Return the setting's compressor if it is cached. Never waits for one to be made."""
        with self._looking:
            compressor = self._kept.pop(config, None)
            if compressor is not None:
                self._kept[config] = compressor  # most recently used last
            return compressor

    def of(self, config: CompressionConfig) -> Compressor:
        """Return the setting's compressor; the last 16 are kept. The first call may read a file. Raises what
        Compressor raises, and InvalidArgumentError for a policy that the KV format does not support."""
        with self._making:
            compressor = self.kept(config)
            if compressor is None:
                compressor = self._make(config)
                with self._looking:
                    self._kept[config] = compressor
                    if len(self._kept) > MAX_KEPT:
                        del self._kept[next(iter(self._kept))]
            return compressor

    def resolved(self, config: CompressionConfig) -> CompressionConfig:
        """Return the setting with "auto" replaced by the policy that the model's statistics name. The first
        call may read a file.

        Raises: InvalidArgumentError, StatsMismatchError. With max_loss also if the statistics hold no curve.
        """
        if config.policy == AUTO and config.max_loss is None and config.budget < FEW_TOKENS:
            text = "budget is %d tokens a head; below about %d, policy auto forgets details; raise it"
            logger.warning(text, config.budget, FEW_TOKENS)
        if config.policy == AUTO or config.max_loss is not None:
            stats = self._checked(config)
            config = config.resolved(stats, repr(self._facts.name))
            self._promised(config, stats, 1)
        return config

    def promised(self, config: CompressionConfig, num_tokens: int) -> CompressionConfig:
        """Return the setting for a prompt of this length: with the budget of the loss curve instead of
        max_loss, and in tokens if it is a share.

        Raises: InvalidArgumentError, StatsMismatchError.
        """
        if config.max_loss is None:
            found = config.for_prompt(num_tokens, self._block_size, self.density)
            self._warn_of_least(config, found, num_tokens)
            return found
        stats = self._checked(config)
        return self._promised(config.resolved(stats, repr(self._facts.name)), stats, num_tokens)

    def _warn_of_least(self, config: CompressionConfig, found: CompressionConfig, num_tokens: int) -> None:
        """Log once that the tokens that are always kept exceed a share of the prompt."""
        share = config.budget_share
        if self._has_warned or share is None or found.budget >= num_tokens:
            return
        tokens = int(Fraction(str(share)) * num_tokens * self.density)
        if tokens >= found.budget:
            return
        self._has_warned = True
        text = (
            "budget is %.4g%%, %d tokens of a prompt of %d, but %d stay, as sinks and recent tokens are "
            "always kept; lower recent, or raise the budget"
        )
        logger.warning(text, 100 * share, tokens, num_tokens, found.budget)

    def _promised(
        self, config: CompressionConfig, stats: QueryStats | None, num_tokens: int
    ) -> CompressionConfig:
        if config.max_loss is None:
            return config
        refuse_unmeasured(config.max_loss, self._engine, ENGINE_MEASURED)
        curve = None if stats is None else stats.metadata.curve
        if curve is None:
            lack = "there are no statistics" if stats is None else "the statistics hold no loss curve"
            raise InvalidArgumentError(
                f"max_loss is {config.max_loss}, and {lack} of {self._facts.name!r}; {MEASURE_CURVE}, or "
                "give a budget.",
                field="max_loss",
            )
        chunk = min(DEFAULT_CHUNK, curve.lengths[-1])
        refuse_chunk(config.max_loss, self._engine.max_num_batched_tokens, chunk)
        return config.promised(curve, self._kv_cache_dtype, num_tokens, self._block_size)

    def _checked(self, config: CompressionConfig) -> QueryStats | None:
        """Return the statistics of a setting, or None. Statistics that have been read need no lock."""
        source = stats_source(config, self._stats_file)
        if source is None:
            return None
        stats = source if isinstance(source, QueryStats) else self._stats.get(os.fspath(source))
        if stats is None:
            with self._making:
                stats = self._read(source)
        stats.check_model(self._facts)
        return stats

    def _make(self, config: CompressionConfig) -> Compressor:
        config = self.resolved(config)
        policy, source = config.make_policy(), stats_source(config, self._stats_file)
        refuse(policy_features(policy) | format_features(self._kv_format))
        stats = self._read(source) if source is not None and policy.needs & STATISTICS else None
        served = replace(config, stats=source).in_blocks(self._block_size)
        if served.budget != config.budget:
            text = "%s: a budget of %d tokens is served as %d, in blocks of %d"
            logger.info(text, config.policy, config.budget, served.budget, self._block_size)
        return Compressor(served, self._facts, stats, self._backend)

    def _read(self, source: StatsSource) -> QueryStats:
        if isinstance(source, QueryStats):
            return source
        name = os.fspath(source)
        if name not in self._stats:
            logger.info("query statistics: %s", name)
            self._stats[name] = QueryStats.load(source).to(self._facts.device)
        return self._stats[name]
