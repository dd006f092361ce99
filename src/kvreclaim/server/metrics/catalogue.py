"""Definitions of all metrics: vLLM's names where the meaning is vLLM's, else `kvreclaim:`.

Counters are named without the `_total` that the text format adds. Bucket bounds are vLLM's, so that its
dashboards draw these histograms in the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from kvreclaim.engine.features import FEATURES

ENGINE_LABELS = ("model_name", "engine")
HTTP_LABELS = ("handler", "method", "status")

REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
FIRST_TOKEN_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))
OUTPUTS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class MetricKind(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """buckets: upper bounds of a histogram; None: 1, 2, 5, 10, ... up to the longest sequence"""

    name: str
    kind: MetricKind
    meaning: str
    labels: tuple[str, ...] = ENGINE_LABELS
    buckets: tuple[float, ...] | None = ()

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        return self.buckets if self.buckets is not None else one_two_five(max_model_len)


def one_two_five(largest: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to and including `largest`."""
    digits = len(str(largest))
    series = (mantissa * 10.0**power for power in range(digits) for mantissa in (1, 2, 5))
    return tuple(bound for bound in series if bound <= largest)


def _gauge(name: str, meaning: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.GAUGE, meaning, (*ENGINE_LABELS, *labels))


def _counter(name: str, meaning: str, *labels: str) -> MetricSpec:
    return MetricSpec(name, MetricKind.COUNTER, meaning, (*ENGINE_LABELS, *labels))


def _histogram(name: str, meaning: str, buckets: tuple[float, ...] | None) -> MetricSpec:
    return MetricSpec(name, MetricKind.HISTOGRAM, meaning, ENGINE_LABELS, buckets)


GAUGES = (
    _gauge("vllm:num_requests_running", "Outputs being computed; a request with n outputs counts n times."),
    _gauge("vllm:num_requests_waiting", "Outputs that wait for their turn or for blocks."),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting outputs by reason: `deferred` while their blocks are read from disk, else `capacity`.",
        "reason",
    ),
    _gauge("vllm:kv_cache_usage_perc", "Share of the pool's blocks in use; 1 is a full pool."),
    _gauge(
        "kvreclaim:blocks",
        "Blocks by state: in_use, cached (unused, or only snapshots hold them; can be hit), free.",
        "state",
    ),
    _gauge("kvreclaim:blocks_peak", "Most blocks in use at once since the start."),
    _gauge("kvreclaim:pinned_blocks", "Blocks kept longer by a cache_control or a prompt_cache_key."),
    _gauge(
        "kvreclaim:state_slots",
        "Slots of recurrent layers by state: in_use, cached (only prefix hits use them), free; 0 without.",
        "state",
    ),
    _gauge("kvreclaim:state_checkpoints", "States of recurrent layers that prefix hits can begin with."),
    _gauge("kvreclaim:host_states", "States of recurrent layers on the host, at the ends of prefixes."),
    _gauge(
        "kvreclaim:reclaim_efficiency",
        "Blocks freed by compression over blocks that perfect packing would free; NaN before the first pass.",
    ),
    _gauge(
        "vllm:kv_offload_cpu_cache_usage_perc", "Share of host slots in use or cached; 0 without offload."
    ),
    _gauge(
        "kvreclaim:tier_slots",
        "Slots of host and disk by state: in_use (by sequences or transfers), cached (can be hit), free.",
        "tier",
        "state",
    ),
    _gauge("kvreclaim:parked_sequences", "Preempted outputs with KV kept on the host."),
    _gauge("kvreclaim:parked_slots", "Host slots used only by preempted outputs."),
    _gauge("kvreclaim:compressed_prefix_files", "Compressed prefixes on disk."),
    _gauge("kvreclaim:compressed_prefix_file_bytes", "Size of compressed prefixes on disk, in whole pages."),
    _gauge(
        "kvreclaim:stream_buffer_bytes",
        "Device buffers for streaming a full cache from host memory; 0 without.",
    ),
)

COUNTERS = (
    _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache, at each admission."),
    _counter("vllm:prefix_cache_hits", "Looked-up prompt tokens found in the pool, on the host or on disk."),
    _counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token, cached ones included."),
    _counter(
        "vllm:prompt_tokens_cached", "Prompt tokens served from the prefix cache, host and disk included."
    ),
    _counter("kvreclaim:snapshot_tokens", "Prompt tokens served from compressed prefixes."),
    _counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens: local_compute, local_cache_hit (the pool) or external_kv_transfer (host or disk).",
        "source",
    ),
    _counter("vllm:generation_tokens", "Generated tokens."),
    _counter("vllm:num_preemptions", "Times a running output lost its blocks."),
    _counter(
        "vllm:request_success",
        "Finished outputs: stop, length, abort (the client left, or shutdown), error.",
        "finished_reason",
    ),
    _counter("kvreclaim:prefix_misses", "Tokens looked up but not found; hits + misses = queries.", "reason"),
    _counter("kvreclaim:prefix_evictions", "Cached blocks reused for new content."),
    _counter("kvreclaim:preemptions", "Preemptions by reason.", "reason"),
    _counter(
        "kvreclaim:pins_refused", "Blocks not pinned, or unpinned, because --max-pinned-fraction was reached."
    ),
    _counter("kvreclaim:tokens_evicted", "Tokens evicted per layer and KV head."),
    _counter("kvreclaim:blocks_freed", "Blocks freed by compression, net, over the steps that freed some."),
    _counter(
        "kvreclaim:blocks_taken",
        "Blocks taken by compression, net, over the steps that took some: private copies of a shared prefix.",
    ),
    _counter("kvreclaim:blocks_perfect", "Blocks that perfect packing would free for the same evictions."),
    _counter("kvreclaim:compactions", "Compression passes."),
    _counter("kvreclaim:compaction_seconds", "Time spent moving tokens and freeing blocks."),
    _counter("kvreclaim:scoring_seconds", "Time spent choosing the tokens to keep."),
    _counter("vllm:spec_decode_num_drafts", "Drafts: one per sequence and step that computed draft tokens."),
    _counter("vllm:spec_decode_num_draft_tokens", "Draft tokens computed."),
    _counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    _counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted, by position in the draft.",
        "position",
    ),
    _counter("kvreclaim:drafts_failed", "Times drafting failed; the sequences went on without."),
    _counter("kvreclaim:engine_steps", "Engine steps."),
    _counter("kvreclaim:engine_step_seconds", "Time spent in engine steps; its rate is the engine's load."),
    _counter(
        "vllm:external_prefix_cache_queries",
        "Tokens in full blocks that the pool did not have, looked up on host and disk.",
    ),
    _counter("vllm:external_prefix_cache_hits", "Prompt tokens found on the host or on disk."),
    _counter(
        "kvreclaim:tier_hit_tokens",
        "Prompt tokens found: device (the pool), host, or disk (read while the request waited).",
        "tier",
    ),
    _counter("kvreclaim:tier_misses", "Tokens looked up that the tier did not have.", "tier"),
    _counter("vllm:kv_offload_store_bytes", "Bytes from pool to host: prefixes and parked outputs."),
    _counter("vllm:kv_offload_store_time", "Seconds of stores to the host."),
    _counter("vllm:kv_offload_load_bytes", "Bytes from host to pool: hits and resumed outputs."),
    _counter("vllm:kv_offload_load_time", "Seconds of loads from the host."),
    _counter("vllm:kv_offload_tiering_write_bytes", "Bytes from host to disk."),
    _counter("vllm:kv_offload_tiering_read_bytes", "Bytes from disk to host."),
    _counter(
        "kvreclaim:preemption_swaps",
        "Preemptions that kept all KV on the host, so that nothing is computed again.",
    ),
    _counter("kvreclaim:swap_out_bytes", "Stored bytes that belong to parked outputs."),
    _counter("kvreclaim:swap_in_bytes", "Loaded bytes that belong to resumed outputs."),
    _counter("kvreclaim:tier_evictions", "Cached slots reused for new content.", "tier"),
    _counter("kvreclaim:tier_corrupt", "Damaged or unexpected records.", "tier"),
    _counter("kvreclaim:tier_failed", "Failed transfers, a full disk included.", "tier"),
    _counter(
        "kvreclaim:tier_dropped",
        "Blocks not written: too many waited, or the disk had failed too often.",
        "tier",
    ),
    _counter("kvreclaim:tier_refused", "Times a block found no slot because all were in use.", "tier"),
    _counter("kvreclaim:compressed_prefix_stores", "Compressed prefixes written to disk."),
    _counter("kvreclaim:compressed_prefix_write_bytes", "Bytes of their files."),
    _counter("kvreclaim:compressed_prefix_loads", "Compressed prefixes read from disk."),
    _counter("kvreclaim:compressed_prefix_read_bytes", "Bytes of their content."),
    _counter(
        "kvreclaim:compressed_prefix_hits",
        "Requests that began with a compressed prefix read from disk.",
    ),
    _counter(
        "kvreclaim:compressed_prefix_corrupt",
        "Files of compressed prefixes that were damaged or foreign.",
    ),
    _counter(
        "kvreclaim:compressed_prefix_failed",
        "Failed reads and writes of compressed prefixes.",
    ),
    _counter(
        "kvreclaim:compressed_prefix_dropped",
        "Compressed prefixes not written: no room, too many waited, or the disk had failed too often.",
    ),
    _counter("kvreclaim:compressed_prefix_evictions", "Files of compressed prefixes evicted to make room."),
    _counter("kvreclaim:streamed_bytes", "Bytes of a full cache in host memory brought to the device."),
    _counter("kvreclaim:written_bytes", "Bytes of its updated blocks written back to host memory."),
    *(_counter(name, text) for feature in FEATURES for name, text in feature.counters.items()),
)

HTTP_COUNTERS = (
    MetricSpec(
        "http_requests",
        MetricKind.COUNTER,
        "Responses by route, method and status class (2xx to 5xx), as in vLLM.",
        HTTP_LABELS,
    ),
    MetricSpec(
        "kvreclaim:http_responses",
        MetricKind.COUNTER,
        "Responses by route, method and status; 499: the client left early.",
        HTTP_LABELS,
    ),
)

HISTOGRAMS = (
    _histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST_TOKEN_SECONDS),
    _histogram("vllm:inter_token_latency_seconds", "Between two tokens of an output.", TOKEN_GAP_SECONDS),
    _histogram(
        "vllm:request_time_per_output_token_seconds",
        "Mean time between two tokens of an output; 0 if it has one.",
        TOKEN_GAP_SECONDS,
    ),
    _histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", REQUEST_SECONDS),
    _histogram("vllm:request_queue_time_seconds", "Arrival to first step.", REQUEST_SECONDS),
    _histogram("vllm:request_prefill_time_seconds", "First step to first token.", REQUEST_SECONDS),
    _histogram("vllm:request_decode_time_seconds", "First to last token.", REQUEST_SECONDS),
    _histogram("vllm:request_inference_time_seconds", "First step to last token.", REQUEST_SECONDS),
    _histogram("vllm:request_prompt_tokens", "Prompt tokens.", None),
    _histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens computed, not cached.", None),
    _histogram("vllm:request_generation_tokens", "Generated tokens of an output.", None),
    _histogram("vllm:request_max_num_generation_tokens", "Tokens of a request's longest output.", None),
    _histogram("vllm:request_params_n", "n of a request.", OUTPUTS),
    _histogram(
        "vllm:request_params_max_tokens",
        "max_tokens of a request, where given, capped by the context.",
        None,
    ),
    _histogram("vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTIONS),
    _histogram("vllm:iteration_tokens_total", "Tokens computed in an engine step.", STEP_TOKENS),
    _histogram("kvreclaim:request_blocks_peak", "Peak blocks of an output.", None),
)

CATALOGUE = (*GAUGES, *COUNTERS, *HTTP_COUNTERS, *HISTOGRAMS)
