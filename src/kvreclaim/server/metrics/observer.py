"""Counts engine events, in the engine's process."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field

from kvreclaim.engine.api.exports import MemoryStats
from kvreclaim.engine.features import FEATURES
from kvreclaim.engine.request.request import Request, Sequence
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.engine.step.engine import Engine, StepResult
from kvreclaim.server.metrics.catalogue import HISTOGRAMS
from kvreclaim.server.metrics.tiers import Values, tier_values

COMPLETE = ("stop", "length")
FINISH_REASONS = ("stop", "length", "abort", "error")


@dataclass(slots=True)
class Histogram:
    """Counts of samples by bucket; a sample on a bound belongs to the bucket that ends there."""

    bounds: tuple[float, ...]
    counts: list[int]
    total: float = 0.0

    @classmethod
    def empty(cls, bounds: tuple[float, ...]) -> Histogram:
        return cls(bounds, [0] * (len(bounds) + 1))

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def copy(self) -> Histogram:
        return Histogram(self.bounds, self.counts.copy(), self.total)


@dataclass(slots=True)
class RequestProgress:
    """Progress of a request's outputs when last seen: lengths, and times of the last tokens (None: none yet);
    `ended` has the indices of finished outputs."""

    lengths: list[int]
    times: list[float | None]
    ended: set[int] = field(default_factory=set)
    begun: bool = False


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """The engine's own figures at the end of a step, all from the same moment."""

    num_running: int
    num_waiting: int
    memory: MemoryStats


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts so far, as plain values from the same moment."""

    values: dict[str, Values]
    histograms: dict[str, Histogram]


class MetricsObserver:
    """An EngineObserver. Costs O(1) per step and O(1) per output that got a token.

    Like vLLM, counts each output of a request with n > 1 as a request.

    clock: the one of Request.arrival_s
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.prompt_tokens_loaded = 0
        self.snapshot_tokens = 0
        self.blocks_freed = 0
        self.blocks_taken = 0
        self.step_s = 0.0
        self.totals = engine.totals  # shared with the engine; only grows
        self.tier_stats = engine.tier_stats  # read only on request
        self.figures = _read(engine)
        self._longest = engine.longest
        self.histograms = {m.name: Histogram.empty(m.bounds(engine.longest)) for m in HISTOGRAMS}
        self._progress: dict[str, RequestProgress] = {}
        self._gaps = self.histograms["vllm:inter_token_latency_seconds"]

    def added(self, engine: Engine, request: Request) -> None:
        lengths = [len(seq.token_ids) for seq in request.sequences]
        self._progress[request.request_id] = RequestProgress(lengths, [None] * len(lengths))
        self._take(engine)

    def stepped(self, engine: Engine, result: StepResult) -> None:
        now = self._clock()
        self.step_s += result.stats.elapsed_s
        self._observe("vllm:iteration_tokens_total", result.stats.num_tokens)
        before: dict[float, int] = {}
        for request in result.requests:
            progress = self._progress.get(request.request_id)
            if progress is not None:
                self._advance(request, progress, now, before)
        self._note_gaps(before, now)
        self._take(engine)

    def ended(self, engine: Engine, request: Request) -> None:
        now = self._clock()
        before: dict[float, int] = {}
        progress = self._progress.pop(request.request_id, None)
        if progress is not None:
            self._advance(request, progress, now, before)
            self._note_gaps(before, now)
            self._conclude(request)
        self._take(engine)

    def counted(self) -> Counted:
        return Counted(engine_values(self), {name: each.copy() for name, each in self.histograms.items()})

    def _take(self, engine: Engine) -> None:
        """Copy the engine's figures, and accumulate the blocks that compression freed and allocated: the
        pool's own count falls when a shared prefix is copied, and a counter must not."""
        figures = _read(engine)
        freed = figures.memory.blocks_freed_by_compression
        net = freed - self.figures.memory.blocks_freed_by_compression
        self.blocks_freed += max(net, 0)
        self.blocks_taken += max(-net, 0)
        self.figures = figures

    def _advance(
        self, request: Request, progress: RequestProgress, now: float, before: dict[float, int]
    ) -> None:
        """Record the request's new tokens and ended outputs. before: number of outputs by the time of their
        previous token; most share a step."""
        lengths, times = progress.lengths, progress.times
        for place, seq in enumerate(request.sequences):
            if place == len(lengths):
                lengths.append(len(request.prompt_token_ids))
                times.append(None)
            length = len(seq.token_ids)
            if length != lengths[place]:
                last = times[place]
                if last is None:
                    self._begin(request, progress)
                else:
                    before[last] = before.get(last, 0) + 1
                lengths[place], times[place] = length, now
            if seq.finish_reason is not None and place not in progress.ended:
                progress.ended.add(place)
                if seq.finish_reason in COMPLETE:
                    self._complete(request, seq, now)

    def _note_gaps(self, before: dict[float, int], now: float) -> None:
        for last, count in before.items():
            self._gaps.observe(now - last, count)

    def _begin(self, request: Request, progress: RequestProgress) -> None:
        metrics = request.metrics
        assert metrics.ttft_s is not None, f"request {request.request_id} has tokens but no first one"
        self._observe("vllm:time_to_first_token_seconds", metrics.ttft_s)
        if not progress.begun:
            progress.begun = True
            self.prompt_tokens += len(request.prompt_token_ids)
            self.prompt_tokens_cached += metrics.num_cached_tokens
            self.prompt_tokens_loaded += metrics.num_loaded_tokens
            self.snapshot_tokens += metrics.num_snapshot_tokens

    def _complete(self, request: Request, seq: Sequence, now: float) -> None:
        """Record the end of an output. (Aborted outputs have no meaningful latency.)"""
        metrics, num_prompt = request.metrics, len(request.prompt_token_ids)
        end = metrics.e2e_s if metrics.e2e_s is not None else now - request.arrival_s
        first, queue = metrics.ttft_s, metrics.queue_s
        if first is None or queue is None:
            return  # scored: no token was sampled
        gaps = seq.num_generated - 1
        for name, value in (
            ("vllm:e2e_request_latency_seconds", end),
            ("vllm:request_queue_time_seconds", queue),
            ("vllm:request_prefill_time_seconds", first - queue),
            ("vllm:request_decode_time_seconds", end - first),
            ("vllm:request_inference_time_seconds", end - queue),
            ("vllm:request_time_per_output_token_seconds", (end - first) / gaps if gaps else 0.0),
            ("vllm:request_prompt_tokens", num_prompt),
            ("vllm:request_prefill_kv_computed_tokens", num_prompt - metrics.num_cached_tokens),
            ("vllm:request_generation_tokens", seq.num_generated),
            ("vllm:request_num_preemptions", metrics.preemptions),
        ):
            self._observe(name, value)
        if request.params.max_tokens is not None:
            most = min(request.params.max_tokens, self._longest)  # bounds the sum
            self._observe("vllm:request_params_max_tokens", most)

    def _conclude(self, request: Request) -> None:
        if not any(seq.finish_reason in COMPLETE for seq in request.sequences):
            return
        self._observe("vllm:request_params_n", request.params.n)
        self._observe(
            "vllm:request_max_num_generation_tokens", max(seq.num_generated for seq in request.sequences)
        )
        self._observe("kvreclaim:request_blocks_peak", max(seq.peak_blocks for seq in request.sequences))

    def _observe(self, name: str, value: float) -> None:
        self.histograms[name].observe(value)


def _read(engine: Engine) -> EngineFigures:
    scheduler = engine.scheduler
    return EngineFigures(len(scheduler.running), len(scheduler.waiting), engine.memory.stats())


def count(host: EngineCore) -> Counted:
    """Start counting in this engine, or return the counts so far."""
    found = next((each for each in host.observers if isinstance(each, MetricsObserver)), None)
    if found is None:
        found = MetricsObserver(host.engine)
        host.observers = (*host.observers, found)
    return found.counted()


def engine_values(seen: MetricsObserver) -> dict[str, Values]:
    stats, memory = seen.tier_stats(), seen.figures.memory
    below = tier_values(stats, memory.prefix_hit_tokens)
    deferred = 0 if stats is None else min(stats.deferred_seqs, seen.figures.num_waiting)
    counts = {name: seen.totals.counts[name] for feature in FEATURES for name in feature.counters}
    return (
        _request_values(seen, deferred) | _cache_values(memory) | _compression_values(seen) | below | counts
    )


def _request_values(seen: MetricsObserver, deferred: int) -> dict[str, Values]:
    figures, totals = seen.figures, seen.totals
    preemptions = dict(totals.preemptions)
    return {
        "vllm:num_requests_running": figures.num_running,
        "vllm:num_requests_waiting": figures.num_waiting,
        "vllm:num_requests_waiting_by_reason": {
            "capacity": figures.num_waiting - deferred,
            "deferred": deferred,
        },
        "vllm:prompt_tokens": seen.prompt_tokens,
        "vllm:prompt_tokens_cached": seen.prompt_tokens_cached,
        "kvreclaim:snapshot_tokens": seen.snapshot_tokens,
        "vllm:prompt_tokens_by_source": {
            "local_compute": seen.prompt_tokens - seen.prompt_tokens_cached,
            "local_cache_hit": seen.prompt_tokens_cached - seen.prompt_tokens_loaded,
            "external_kv_transfer": seen.prompt_tokens_loaded,
        },
        "vllm:generation_tokens": totals.generation_tokens,
        "vllm:num_preemptions": sum(preemptions.values()),
        "vllm:request_success": {reason: totals.finished.get(reason, 0) for reason in FINISH_REASONS},
        "kvreclaim:preemptions": preemptions,
        "kvreclaim:engine_steps": totals.steps,
        "kvreclaim:engine_step_seconds": seen.step_s,
        "kvreclaim:stream_buffer_bytes": totals.stream_buffer_bytes,
        "kvreclaim:streamed_bytes": totals.streamed_bytes,
        "kvreclaim:written_bytes": totals.written_bytes,
    }


def _cache_values(memory: MemoryStats) -> dict[str, Values]:
    return {
        "vllm:kv_cache_usage_perc": memory.in_use / memory.num_blocks,
        "vllm:prefix_cache_queries": memory.prefix_query_tokens,
        "vllm:prefix_cache_hits": memory.prefix_hit_tokens,
        "kvreclaim:blocks": {"in_use": memory.in_use, "cached": memory.cached, "free": memory.free},
        "kvreclaim:blocks_peak": memory.peak_in_use,
        "kvreclaim:pinned_blocks": memory.pinned,
        "kvreclaim:state_slots": memory.states.slots,
        "kvreclaim:state_checkpoints": memory.states.checkpoints,
        "kvreclaim:pins_refused": memory.pins_refused,
        "kvreclaim:prefix_misses": memory.misses,
        "kvreclaim:prefix_evictions": memory.prefix_evictions,
    }


def _compression_values(seen: MetricsObserver) -> dict[str, Values]:
    totals, net_freed = seen.totals, seen.blocks_freed - seen.blocks_taken
    return {
        "kvreclaim:reclaim_efficiency": (
            net_freed / totals.blocks_perfect if totals.blocks_perfect else float("nan")
        ),
        "kvreclaim:tokens_evicted": totals.tokens_evicted,
        "kvreclaim:blocks_freed": seen.blocks_freed,
        "kvreclaim:blocks_taken": seen.blocks_taken,
        "kvreclaim:blocks_perfect": totals.blocks_perfect,
        "kvreclaim:compactions": totals.compactions,
        "kvreclaim:compaction_seconds": totals.compact_s,
        "kvreclaim:scoring_seconds": totals.score_s,
        **_draft_values(seen),
    }


def _draft_values(seen: MetricsObserver) -> dict[str, Values]:
    drafts = seen.totals.speculation
    return {
        "vllm:spec_decode_num_drafts": drafts.num_drafts,
        "vllm:spec_decode_num_draft_tokens": drafts.num_draft_tokens,
        "vllm:spec_decode_num_accepted_tokens": drafts.num_accepted_tokens,
        "vllm:spec_decode_num_accepted_tokens_per_pos": {
            str(place): count for place, count in enumerate(drafts.accepted_at)
        },
        "kvreclaim:drafts_failed": drafts.num_failed,
    }
