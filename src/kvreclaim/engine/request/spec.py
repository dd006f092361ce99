"""What a caller asks of an engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.beams import BeamSearchParams
from kvreclaim.chunks import Chunks
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.memory.pins import Retention
from kvreclaim.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, from the front end to the engine. Whoever takes it in checks it.

    prompt:       the text that the token ids come from, to be reported
    compression:  None takes the LLM's own
    continuation: its tokens are scored instead of drawing any
    priority:     under scheduling_policy "priority" a lower number runs first; else 0
    retention:    how long the blocks of which leading prompt tokens are worth keeping
    tenant:       for whom: tenants get fair shares of the engine
    compress_prompt_at: tokens of the prompt behind which it is compressed, whatever is due; what that leaves
                  is kept for requests that begin with the same tokens and say the same
    beams:        search instead of drawing; params are then its `sampling`
    cache_salt:   prefix blocks are shared only among requests with the same salt
    sparse_prefill: how the prompt is computed, by name or as a method; None: as the engine says
    chunks:       parts of the prompt that are computed alone first, unless they have been, and reused
    may_end_early: where the pool cannot hold max_tokens, outputs end where it ends; else that is refused
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
    compress_prompt_at: int | None = None
    beams: BeamSearchParams | None = None
    cache_salt: str | None = None
    sparse_prefill: str | SparsePrefill | None = None
    chunks: Chunks | None = None
    may_end_early: bool = False

    @property
    def num_sequences(self) -> int:
        """Sequences that run for the request at once."""
        return self.params.n if self.beams is None else self.beams.beam_width
