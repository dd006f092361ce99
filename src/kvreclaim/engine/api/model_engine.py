"""A model with its engine, and operations on both next to running requests."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

from kvreclaim.checks import check_int, require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig, StatsSource
from kvreclaim.compression.loss_curve import CONTINUED
from kvreclaim.compression_settings import FULL
from kvreclaim.config import EngineConfig
from kvreclaim.engine.api.chat import span_by_template
from kvreclaim.engine.api.compressors import Compressors
from kvreclaim.engine.api.kept_statistics import in_best_format, stats_source
from kvreclaim.engine.api.prompts import Prompt, check_type, request_of
from kvreclaim.engine.api.warm_up import warm_up
from kvreclaim.engine.features import FEATURES
from kvreclaim.engine.features.snapshots.feature import SnapshotUse
from kvreclaim.engine.offload.session import SessionInfo
from kvreclaim.engine.offload.stats import TierStats
from kvreclaim.engine.request.outputs import EngineTotals
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.sizing import choose_limits
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.speculative.load import DraftModel, load_draft
from kvreclaim.engine.step.engine import Engine
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.stats import MemoryStats
from kvreclaim.model.loader import LoadedModel, Tokenizer
from kvreclaim.ops.moving import on_device
from kvreclaim.refusals.max_loss import refuse_tail, refuse_unmeasured
from kvreclaim.sampling_params import SamplingParams

OF_THE_WEIGHTS = ("quantized_activations", "hf_overrides", "cache_packed_weights", "threads")
"""Engine options that are fixed when a model is loaded."""


@dataclass(frozen=True, slots=True)
class LLMStats:
    """An engine's state now, and its counters since the start.

    memory:  blocks of the pool
    offload: host and disk; None without offloading
    """

    num_running: int
    num_waiting: int
    memory: MemoryStats
    totals: EngineTotals
    offload: TierStats | None


class ModelEngine:
    """A loaded model and its engine, with a default compression for requests; a context manager that closes
    it.

    Args:
        loaded, stats_file: the model, and the path of its statistics, which need not exist
        config:             of the caller; options that it leaves open are chosen
        compression:        of requests without their own; None keeps every token
        draft:              a draft model of another engine; its weights are shared if they fit
        stats:              statistics for the key transform of a coded cache; None: those of `compression`,
                            otherwise of stats_file
        warms_up:           on a GPU, compile the kernels of usual requests now

    Raises: InvalidArgumentError, StatsMismatchError.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        stats_file: Path,
        config: EngineConfig,
        compression: CompressionConfig | None,
        draft: DraftModel | None = None,
        stats: StatsSource | None = None,
        *,
        warms_up: bool = True,
    ) -> None:
        self.loaded, self.stats_file, self._given_config = loaded, stats_file, config
        self._given_stats = stats
        self.draft = load_draft(config, loaded, draft)
        spoken_for = loaded.mapped_bytes
        if self.draft is not None:
            spoken_for += self.draft.kv_bytes + self.draft.loaded.mapped_bytes
        if compression is not None:
            check_type("compression", compression, CompressionConfig)
        if stats is None:
            stats = stats_source(compression, stats_file)
        config = in_best_format(config, compression, stats, loaded.facts)
        if warms_up and loaded.facts.device.type == "cuda":
            warm_up(
                lambda small: ModelEngine(loaded, stats_file, small, None, self.draft, stats, warms_up=False),
                config,
                compression,
                loaded,
            )
        with on_device(loaded.facts.device):
            limits = choose_limits(config, loaded.facts, spoken_for)
            self.engine = Engine(loaded, limits, FEATURES, self.draft, stats)
        backend, kv_format = self.engine.backend, self.engine.kv_format
        self.compressors = Compressors(
            self.engine.groups.facts, stats_file, backend, kv_format, self.engine.config
        )
        self._ids = itertools.count()
        self.compression = None if compression is None else self.resolved(compression)
        own = None if self.compression is None else self.compressor(self.compression)
        self.engine.bound(own, config.max_model_len)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def compressed(self, compression: CompressionConfig | None) -> Iterator[Self]:
        """Give requests without their own compression this one, inside a with block; None keeps every token.

        max_model_len stays that of the engine. Raises: InvalidArgumentError, StatsMismatchError.
        """
        before = self.compression
        if compression is not None:
            compression = self.resolved(compression)
            self.compressor(compression)
        self.compression = compression
        try:
            yield self
        finally:
            self.compression = before

    def close(self) -> None:
        """Wait for pending writes to disk and close the file; it also happens when the process ends. Without
        a disk tier it does nothing."""
        self.engine.close()

    def sibling(self, *, stats: StatsSource | None = None, **changes: Any) -> Self:
        """A second engine on the same weights (and draft model's weights), with a pool of its own.

        stats:   statistics for the key transform of a coded cache; None: as in this engine
        changes: engine options that differ from this engine's. Options that were left open are chosen again,
                 from the memory that is free now

        Raises: InvalidArgumentError.
        """
        options = {field.name: getattr(self._given_config, field.name) for field in fields(EngineConfig)}
        config = EngineConfig.from_options(options | changes)
        for name in OF_THE_WEIGHTS:
            if getattr(config, name) != options[name]:
                raise InvalidArgumentError(
                    f"{name} is {getattr(config, name)!r}, and the weights were loaded with "
                    f"{options[name]!r}; make another LLM."
                )
        if stats is None:
            stats = self._given_stats
        other = type(self).__new__(type(self))
        ModelEngine.__init__(
            other, self.loaded, self.stats_file, config, self.compression, self.draft, stats, warms_up=False
        )
        return other

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises: InvalidArgumentError if it has none."""
        if self.loaded.tokenizer is None:
            raise InvalidArgumentError(
                f"{self.loaded.facts.name} has no tokenizer; pass prompts as token ids."
            )
        return self.loaded.tokenizer

    def _encode(self, text: str, begins: bool) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=begins))

    def add_prompt(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams,
        compression: CompressionConfig | None = None,
        **spec_fields: Any,
    ) -> Request:
        """Queue a request under the next id. spec_fields: RequestSpec's other fields

        Raises: InvalidArgumentError, RequestTooLongError.
        """
        params = sampling_params
        check_type("sampling_params", params, SamplingParams)
        config = compression if compression is not None else self.compression
        if config is not None:
            check_type("compression", config, CompressionConfig)
        request_id = f"request-{next(self._ids)}"
        spec = self.promised(
            request_of(
                prompt, self._encode, request_id=request_id, params=params, compression=config, **spec_fields
            )
        )
        if params.thinking_token_budget is not None:
            spec = spec.having(span_by_template(self.loaded.tokenizer, spec.prompt_token_ids))
        compressor = None if spec.compression is None else self.compressor(spec.compression)
        return self.engine.add(spec, compressor)

    def abort(self, request_id: str) -> None:
        """End a request and return its blocks. Raises: UnknownRequestError."""
        self.engine.abort(request_id)

    # What requests need before they are added; from any thread.

    def resolved(self, config: CompressionConfig) -> CompressionConfig:
        """The config with "auto" replaced by the policy that this model's statistics name."""
        check_type("compression", config, CompressionConfig)
        return self.compressors.resolved(config)

    def promised(self, spec: RequestSpec) -> RequestSpec:
        """The request with its compression, or else this LLM's, at the budget that a share or max_loss gives
        for its prompt, or for what is compressed of it. Where everything must stay, compress_prompt_at has no
        use."""
        config, snapshots = spec.compression or self.compression, spec.option(SnapshotUse)
        at = None if snapshots is None else snapshots.compress_prompt_at
        if config is None or not config.is_of_prompt:
            return spec if spec.compression is config else replace(spec, compression=config)
        length = len(spec.prompt_token_ids)
        if at is not None:
            check_int("compress_prompt_at", at, 1)
        if config.max_loss is None:
            return replace(spec, compression=self.compressors.promised(config, at or length))
        for feature in FEATURES:
            if (option := spec.option(feature.option)) is not None:
                values = {name: getattr(option, name, option) for name in feature.measured}
                refuse_unmeasured(config.max_loss, SimpleNamespace(**values), feature.measured)
        if at is not None:
            refuse_tail(config.max_loss, at, length, CONTINUED)
        config = self.compressors.promised(config, at or length)
        if snapshots is not None and config.policy == FULL:
            spec = spec.having(replace(snapshots, compress_prompt_at=None))
        return replace(spec, compression=config)

    def compressor(self, config: CompressionConfig) -> Compressor:
        """A compressor for this model; reads the model's statistics if the config names none."""
        check_type("compression", config, CompressionConfig)
        return self.compressors.of(config)

    # State of the engine.

    def stats(self) -> LLMStats:
        """A copy of the present figures: requests, blocks, offload and counters."""
        engine = self.engine
        running, waiting = len(engine.scheduler.running), len(engine.scheduler.waiting)
        return LLMStats(running, waiting, engine.memory.stats(), deepcopy(engine.totals), engine.tier_stats())

    def save_session(
        self,
        prompt: Prompt,
        path: str | os.PathLike[str],
        *,
        compression: CompressionConfig | None = None,
    ) -> SessionInfo:
        """Write the cached leading full blocks of a prompt to a file, from the pool, host or disk. To include
        the answer, pass output.prompt_token_ids + output.outputs[0].token_ids.

        prompt:      with compress_prompt_at n: the compressed prefix of the first n tokens instead
        compression: of such a prefix, as when it was computed; None for the engine's own

        Raises: InvalidArgumentError if nothing is cached, OSError.
        """
        spec = self.promised(
            request_of(prompt, self._encode, params=SamplingParams(), compression=compression)
        )
        tokens, salt, config = spec.prompt_token_ids, spec.cache_salt, spec.compression
        snapshots = spec.option(SnapshotUse)
        if snapshots is None or snapshots.compress_prompt_at is None:
            require(
                compression is None,
                "compression is given without compress_prompt_at, and only a prefix compressed there can be "
                "saved; pass compress_prompt_at, or leave compression out.",
                "compress_prompt_at",
            )
            return self.engine.sessions.save(tokens, path, salt)
        compressor = None if config is None else self.compressor(config)
        at = snapshots.compress_prompt_at
        return self.engine.sessions.save_compressed(tokens, path, salt, compressor, at)

    def load_session(self, path: str | os.PathLike[str], *, cache_salt: str | None = None) -> SessionInfo:
        """Read a file of save_session into the prefix cache: prompts with this beginning and salt hit it. A
        compressed prefix serves prompts with the same compression and compress_prompt_at.

        Raises: InvalidArgumentError if the file is damaged, there is no room, or model, KV format or block
            size differ (it names them); OSError.
        """
        return self.engine.sessions.load(path, cache_salt)
