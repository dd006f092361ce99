"""A request as a caller specifies it, and the KV memory that it may hold under its compression."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from zlib import crc32

from kvreclaim.beams import BeamSearchParams
from kvreclaim.checks import check_int, require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policy import window_of
from kvreclaim.config import EngineConfig
from kvreclaim.memory.pins import Retention
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.refusals import Feature, refuse
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule.budget.footprint import Footprint

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, from the front end to the engine, which checks it.

    prompt:       the text of the token ids, for the output
    compression:  None takes the LLM's own
    continuation: tokens to score; none are generated
    priority:     lower runs first, under scheduling_policy "priority"; else 0
    retention:    pins of leading tokens, of the answer, too, if they reach as far
    tenant:       tenants get fair shares of the engine
    cache_salt:   prefix blocks are shared only among requests with the same salt
    may_end_early: if the pool cannot hold max_tokens, end the outputs where it ends; False: refuse
    options:      of features, by their types (engine/features/); with a BeamSearchParams, params are its
                  `sampling`
    """

    request_id: str = ""
    prompt_token_ids: list[int]
    params: SamplingParams
    prompt: str | None = None
    compression: CompressionConfig | None = None
    continuation: list[int] | None = None
    priority: int = 0
    retention: tuple[Retention, ...] = ()
    tenant: str | None = None
    cache_salt: str | None = None
    may_end_early: bool = False
    options: Mapping[type, Any] = field(default_factory=dict)

    def option(self, kind: type[T]) -> T | None:
        """The request's option of a type, or of one that derives from it; None: it has none."""
        return next((each for each in self.options.values() if isinstance(each, kind)), None)

    def having(self, option: object) -> RequestSpec:
        """The request with this option, too; None: as it is."""
        return self if option is None else replace(self, options={**self.options, type(option): option})

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once for the request."""
        beams = self.option(BeamSearchParams)
        return self.params.n if beams is None else beams.beam_width


def footprint_of(
    compressor: Compressor | None,
    config: EngineConfig,
    prompt: list[int],
    groups: LayerGroups | None = None,
) -> Footprint:
    """The footprint of a request in this engine.

    With spread_compression its due points are shifted by less than the interval, by a hash of its prompt: a
    function of the request alone, so that a preempted one makes the same choices again.
    """
    plain = Footprint(block_size=config.block_size, max_chunk=config.max_num_batched_tokens)
    if groups is not None:
        plain = replace(plain, windows=groups.windows, trailing=groups.trailing)
    if compressor is None:
        return plain
    settings = compressor.config
    window = window_of(compressor.policy) if compressor.eviction_method.evicts else 1
    choices = max(1, settings.interval - config.block_size + 1) if config.spread_compression else 1
    return replace(
        settings.footprint(plain),
        window=window,
        offset=crc32(array("q", prompt).tobytes()) % choices,
    )


def compressing_prompt(
    footprint: Footprint, at: int, compressor: Compressor | None, num_prompt: int
) -> Footprint:
    """Return the footprint of a request with its first `at` tokens compressed at once.

    Raises: InvalidArgumentError.
    """
    check_int("compress_prompt_at", at, 1)
    evicts = compressor is not None and compressor.eviction_method.evicts
    refuse({Feature.COMPRESS_AT: at, Feature.NO_EVICTION: not evicts})
    require(
        at < num_prompt,
        f"compress_prompt_at is {at}, but the prompt has {num_prompt} tokens; "
        "lower it, so that at least one token follows.",
        "compress_prompt_at",
    )
    return replace(footprint, compress_prompt_at=at)
