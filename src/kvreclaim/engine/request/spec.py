"""A request as the engine receives it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.beams import BeamSearchParams
from kvreclaim.chunks import Chunks
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.memory.pins import Retention
from kvreclaim.parsers.thinking import ThinkSpan
from kvreclaim.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSpec:
    """One request, from the front end to the engine, which checks it.

    prompt:       the text of the token ids, for the output
    compression:  None takes the LLM's own
    continuation: tokens to score; none are generated
    priority:     lower runs first, under scheduling_policy "priority"; else 0
    retention:    pins of leading tokens, of the answer, too, if they reach as far
    tenant:       tenants get fair shares of the engine
    compress_prompt_at: n: compress the first n prompt tokens at once, and keep the result for requests with
                  the same tokens, compression and n
    conversation_snapshots: whether it goes on from what earlier turns of its conversation have kept after
                  compression, and keeps it for the next one; None: as the engine is set
    is_rewritten: the next turn's prompt may say the answer in other tokens; what is left of this prompt is
                  kept as well then
    drop_spans:   (first, last + 1) of prompt tokens whose keys and values leave the cache before the token at
                  drop_at is computed; None: before the last one of the prompt
    beams:        a beam search; params are then its `sampling`
    cache_salt:   prefix blocks are shared only among requests with the same salt
    sparse_prefill: method of the prompt, by name or as an object; None: the engine's own
    chunks:       parts of the prompt that are computed alone once and reused
    thinking:     where its outputs have reasoning, whose tokens are counted; None: nobody asks
    may_end_early: if the pool cannot hold max_tokens, end the outputs where it ends; False: refuse
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
    conversation_snapshots: bool | None = None
    is_rewritten: bool = False
    drop_spans: Sequence[tuple[int, int]] | None = None
    drop_at: int | None = None
    beams: BeamSearchParams | None = None
    cache_salt: str | None = None
    sparse_prefill: str | SparsePrefill | None = None
    chunks: Chunks | None = None
    thinking: ThinkSpan | None = None
    may_end_early: bool = False

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once for the request."""
        return self.params.n if self.beams is None else self.beams.beam_width
