"""Outputs and figures of requests. Names follow vLLM where it has them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, Literal, TypeVar, get_args

from kvreclaim.engine.sampling.logprobs import Logprob, PromptLogprobs
from kvreclaim.schedule.step import PreemptionReason

T = TypeVar("T")

FinishReason = Literal["stop", "length", "abort", "error"]


class Grown(Generic[T]):
    """A view of a list that only grows, from one place on; copied when read."""

    __slots__ = ("_items", "_start", "_stop")

    def __init__(self, items: list[T], start: int = 0) -> None:
        self._items, self._start, self._stop = items, start, len(items)

    def copy(self) -> list[T]:
        return self._items[self._start : self._stop]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grown) and self.copy() == other.copy()

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.copy())


@dataclass
class CompletionOutput:
    """One output of a request; text, token_ids and logprobs hold everything so far.

    drawn, reports: sources of token_ids and logprobs, which are copied when read; a stream copies nothing
    logprobs:       None unless requested
    stop_reason:    the stop string or token id that ended it; None for end-of-sequence or a length limit
    cumulative_logprob: sum over the tokens; only of a beam search
    sequences_scores: cumulative_logprob / length ** length_penalty; only of a beam search
    """

    index: int
    text: str
    drawn: Grown[int]
    reports: Grown[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    sequences_scores: float | None = None

    @cached_property
    def token_ids(self) -> list[int]:
        return self.drawn.copy()

    @cached_property
    def logprobs(self) -> list[dict[int, Logprob]] | None:
        return None if self.reports is None else self.reports.copy()


@dataclass(slots=True)
class RequestMetrics:
    """Costs of one request, and the blocks it gave back, over all its outputs.

    policy:         the policy as written, or the one "auto" stands for; None without compression
    budget:         tokens per layer and KV head that compression keeps (or reads), in whole blocks; None
                    without compression
    sinks:          first tokens that compression never evicts, a chat's system prompt and tools among them;
                    None without compression
    tokens_evicted: tokens evicted per layer and KV head, dropped ones included
    num_dropped_tokens: prompt tokens that the caller dropped and that have left the cache, in this request or
                    before; whole blocks of them
    blocks_freed:   blocks that compression returned to the pool while the request lived, less those it took;
                    below 0 while other requests hold shared blocks that it left
    blocks_perfect: blocks that perfect packing would have returned for the same evictions
    tokens_lost_to_rounding: with unequal heads, tokens that rounding to whole blocks took from one head and
                    gave to another, summed over passes and heads; no block is lost
    peak_blocks:    most blocks in the table of one output between two steps
    answer_blocks:  the same over the steps after the prompt; 0 if there was none
    final_blocks:   entries of the outputs' block tables after their last steps; a block that several outputs
                    share counts for each
    num_cached_tokens: prompt tokens served from the prefix cache: pool, host or disk
    num_loaded_tokens: of these, from host or disk
    num_disk_tokens: of these, read from disk while the request waited
    num_snapshot_tokens: of num_cached_tokens, those of a compressed prefix; the others are exact blocks
    num_indexed_tokens: leading prompt tokens served from the prefix index or added to it
    num_repeated_tokens: of these, computed although the index had them
    prefill_tokens_seen: tokens that dense attention would have read for sparsely computed prompt tokens,
                    summed over rows, layers and KV heads; prefill_tokens_read: of these, those read
    num_reused_tokens: prompt tokens with keys and values from chunks computed alone
    num_reasoning_tokens: generated tokens of reasoning, its markers not among them; None: they are not
                    counted
    num_gone_tokens: prompt tokens that were to be reused but had left the cache, and were computed
    counts:         figures of further features, by name
    queue_s:        seconds from arrival to the first step that computes a token; None while it waits
    ttft_s, e2e_s:  seconds from arrival to the first and the last token; None until then
    """

    policy: str | None = None
    budget: int | None = None
    sinks: int | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_loaded_tokens: int = 0
    num_disk_tokens: int = 0
    num_snapshot_tokens: int = 0
    num_indexed_tokens: int = 0
    num_repeated_tokens: int = 0
    num_reused_tokens: int = 0
    num_gone_tokens: int = 0
    num_dropped_tokens: int = 0
    num_generated_tokens: int = 0
    num_reasoning_tokens: int | None = None
    tokens_evicted: int = 0
    blocks_freed: int = 0
    blocks_perfect: int = 0
    tokens_lost_to_rounding: int = 0
    compactions: int = 0
    peak_blocks: int = 0
    answer_blocks: int = 0
    final_blocks: int = 0
    preemptions: int = 0
    prefill_tokens_seen: int = 0
    prefill_tokens_read: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def prefill_share(self) -> float | None:
        """prefill_tokens_read / prefill_tokens_seen; None if nothing was computed sparsely."""
        return self.prefill_tokens_read / self.prefill_tokens_seen if self.prefill_tokens_seen else None

    @property
    def reclaim_efficiency(self) -> float | None:
        """blocks_freed / blocks_perfect; None if blocks_perfect is 0."""
        return self.blocks_freed / self.blocks_perfect if self.blocks_perfect else None


@dataclass
class RequestOutput:
    """A request's outputs; `finished` when each of them has a finish_reason.

    error:           why the request failed; else None
    prompt_reports:  source of prompt_logprobs, which are copied when read
    prompt_logprobs: one entry per prompt token so far, the first is None; None unless requested
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: str | None = None
    prompt_reports: Grown[dict[int, Logprob] | None] | None = None

    @cached_property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        return None if self.prompt_reports is None else self.prompt_reports.copy()


@dataclass(slots=True)
class ScoreOutput:
    """A given continuation under the model (teacher forcing), one entry per continuation token.

    predicted: the most likely token at each position; logprobs: of the given tokens, in nats
    """

    request_id: str
    predicted: list[int]
    logprobs: list[float]
    metrics: RequestMetrics
    error: str | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """One engine step, for charts and logs.

    num_running, num_waiting, blocks_in_use: at the end of the step, after compression and after finished
                        requests left
    num_prefill_tokens: of num_tokens, tokens of prompts and of sequences that are recomputed
    num_decode_tokens:  the rest: the newest token of each generating sequence, and its drafts
    num_prompts_done:   requests that completed their prompt in this step, for the first time
    """

    num_running: int
    num_waiting: int
    num_tokens: int
    num_prefill_tokens: int
    num_decode_tokens: int
    num_prompts_done: int
    blocks_in_use: int
    elapsed_s: float


@dataclass(slots=True)
class SpeculationTotals:
    """Drafts over the engine's life.

    accepted_at: accepted drafts by their position
    num_failed:  times drafting failed; the sequences went on without
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_at: list[int] = field(default_factory=list)
    num_failed: int = 0

    def note(self, drafted: int, accepted: int) -> None:
        """Tokens of one sequence in one step."""
        self.num_drafts += 1
        self.num_draft_tokens += drafted
        self.num_accepted_tokens += accepted
        self.accepted_at += [0] * (accepted - len(self.accepted_at))
        for place in range(accepted):
            self.accepted_at[place] += 1


@dataclass(slots=True)
class EngineTotals:
    """Counters over the engine's life.

    preemptions: sequences that lost their blocks, by reason (all reasons are always there)
    swaps:       of these, sequences with their blocks' bytes kept on the host
    finished:    sequences by finish reason
    counts:      counters of features, by the names of their metrics
    streamed_bytes: of a full cache in host memory: brought to the device; written_bytes: of its blocks that
                 got tokens, back to the host; stream_buffer_bytes: what the buffers on the device take now
    """

    steps: int = 0
    prompt_tokens: int = 0
    prompts_done: int = 0
    generation_tokens: int = 0
    tokens_evicted: int = 0
    blocks_perfect: int = 0
    compactions: int = 0
    score_s: float = 0.0
    compact_s: float = 0.0
    swaps: int = 0
    speculation: SpeculationTotals = field(default_factory=SpeculationTotals)
    streamed_bytes: int = 0
    written_bytes: int = 0
    stream_buffer_bytes: int = 0
    preemptions: dict[str, int] = field(default_factory=lambda: dict.fromkeys(get_args(PreemptionReason), 0))
    finished: dict[str, int] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def num_preemptions(self) -> int:
        return sum(self.preemptions.values())
