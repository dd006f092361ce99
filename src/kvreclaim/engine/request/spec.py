"""A request as the engine receives it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from kvreclaim.beams import BeamSearchParams
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.memory.pins import Retention
from kvreclaim.sampling_params import SamplingParams

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
