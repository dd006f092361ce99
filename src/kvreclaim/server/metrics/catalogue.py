"""Every metric there is, with its meaning: vLLM's names where vLLM means the same, else `kvreclaim:`.

Counters are named without the `_total` that the text format adds. Bucket bounds are vLLM's, so that
dashboards made for it draw these histograms alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

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
RESIDENCY_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0, 1200.0, 1800.0),
)
STEP_TOKENS = (1.0, *(float(1 << power) for power in range(3, 15)))
OUTPUTS = (1.0, 2.0, 5.0, 10.0, 20.0)
PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)


class Kind(Enum):
    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """buckets: upper bounds of a histogram; None: 1, 2, 5, 10, ... up to the longest sequence"""

    name: str
    kind: Kind
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


def _gauge(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.GAUGE, meaning, (*ENGINE_LABELS, *labels))


def _counter(name: str, meaning: str, *labels: str) -> Metric:
    return Metric(name, Kind.COUNTER, meaning, (*ENGINE_LABELS, *labels))


def _histogram(name: str, meaning: str, buckets: tuple[float, ...] | None) -> Metric:
    return Metric(name, Kind.HISTOGRAM, meaning, ENGINE_LABELS, buckets)


GAUGES = (
    _gauge("vllm:num_requests_running", "Outputs being computed; a request with n outputs counts n times."),
    _gauge("vllm:num_requests_waiting", "Outputs that wait for their turn or for blocks."),
    _gauge(
        "vllm:num_requests_waiting_by_reason",
        "The same by reason: `deferred` while blocks are read from disk for them, else `capacity`.",
        "reason",
    ),
    _gauge("vllm:kv_cache_usage_perc", "Blocks in use over blocks in the pool; 1 is a full pool."),
    _gauge("kvreclaim:blocks", "Blocks by state: in_use, cached (unused, can be hit), free.", "state"),
    _gauge("kvreclaim:blocks_peak", "Most blocks in use at once since the start."),
    _gauge("kvreclaim:pinned_blocks", "Blocks kept longer by a cache_control or a prompt_cache_key."),
    _gauge(
        "kvreclaim:reclaim_efficiency",
        "Blocks that compression freed over those that perfect packing would have; NaN before the first.",
    ),
    _gauge("vllm:kv_offload_cpu_cache_usage_perc", "Host slots that hold something over all; 0 without."),
    _gauge(
        "kvreclaim:tier_slots",
        "Slots of host and disk by state: in_use (by sequences or transfers), cached (can be hit), free.",
        "tier",
        "state",
    ),
    _gauge(
        "kvreclaim:parked_sequences", "Outputs that gave way and wait with all they held kept on the host."
    ),
    _gauge("kvreclaim:parked_slots", "Host slots that these have for themselves."),
    _gauge("kvreclaim:cold_bytes", "Host memory that holds evicted tokens which may be recalled."),
    _gauge("kvreclaim:compressed_prefix_files", "Compressed prefixes on disk that may be read."),
    _gauge("kvreclaim:compressed_prefix_file_bytes", "Of these, in whole pages."),
    _gauge(
        "kvreclaim:stream_buffer_bytes",
        "On the device, of the buffers that layers of a full cache in host memory come through; 0 without.",
    ),
)

COUNTERS = (
    _counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache, at each admission."),
    _counter("vllm:prefix_cache_hits", "Those that were found, in the pool or below."),
    _counter("vllm:prompt_tokens", "Prompt tokens of requests that got a first token, cached ones included."),
    _counter(
        "vllm:prompt_tokens_cached", "Those of them that came from the prefix cache, host and disk included."
    ),
    _counter(
        "vllm:prompt_tokens_by_source",
        "Prompt tokens: local_compute, local_cache_hit (the pool) or external_kv_transfer (host or disk).",
        "source",
    ),
    _counter("vllm:generation_tokens", "Tokens drawn."),
    _counter("vllm:num_preemptions", "Times that a running output lost its blocks to another."),
    _counter(
        "vllm:request_success",
        "Outputs that ended: stop, length, abort (the client left, or shutdown), error.",
        "finished_reason",
    ),
    _counter("kvreclaim:prefix_misses", "Looked-up tokens not found; hits + misses = queries.", "reason"),
    _counter("kvreclaim:prefix_evictions", "Cached blocks reused for something else."),
    _counter("kvreclaim:preemptions", "Preemptions by reason.", "reason"),
    _counter(
        "kvreclaim:pins_refused", "Blocks not pinned, or no longer, since --max-pinned-fraction was reached."
    ),
    _counter("kvreclaim:tokens_evicted", "Tokens that left the attention of every head."),
    _counter("kvreclaim:blocks_freed", "Blocks that compression gave back, net, in steps where it gave."),
    _counter(
        "kvreclaim:blocks_taken",
        "Blocks that compression took, net, in steps where it took: private copies of a shared prefix.",
    ),
    _counter("kvreclaim:blocks_perfect", "Blocks that perfect packing would free for the same evictions."),
    _counter("kvreclaim:compactions", "Compression passes over an output."),
    _counter("kvreclaim:compaction_seconds", "Time spent moving tokens and giving blocks back."),
    _counter("kvreclaim:scoring_seconds", "Time spent choosing the tokens that stay."),
    _counter("kvreclaim:recall_pages", "Pages of evicted tokens of one head that came back into the cache."),
    _counter("kvreclaim:recall_bytes", "Their bytes, from the host to the pool."),
    _counter("kvreclaim:recall_hits", "Of pages that were back at a pass, those of which a token stayed."),
    _counter("kvreclaim:cold_dropped", "Pages that went for good, since --kv-recall-size was reached."),
    _counter("vllm:spec_decode_num_drafts", "Sequences in steps that computed drafts of theirs."),
    _counter("vllm:spec_decode_num_draft_tokens", "Tokens that were guessed and computed."),
    _counter("vllm:spec_decode_num_accepted_tokens", "Of these, the ones that the model has drawn, too."),
    _counter("vllm:spec_decode_num_accepted_tokens_per_pos", "The same by place in their draft.", "position"),
    _counter("kvreclaim:drafts_failed", "Times that drafting failed, and sequences went on without."),
    _counter("kvreclaim:engine_steps", "Engine steps."),
    _counter("kvreclaim:engine_step_seconds", "Time spent in engine steps; its rate is the engine's load."),
    _counter(
        "vllm:external_prefix_cache_queries",
        "Tokens in full blocks that the pool did not have and that were looked up on host and disk.",
    ),
    _counter("vllm:external_prefix_cache_hits", "Those that were found there."),
    _counter(
        "kvreclaim:tier_hit_tokens",
        "Found prompt tokens by where they lay: device (the pool), host, or disk (read while it waited).",
        "tier",
    ),
    _counter("kvreclaim:tier_misses", "Looked-up tokens that the tier did not have.", "tier"),
    _counter("vllm:kv_offload_store_bytes", "From the pool to the host: prefixes, and parked outputs."),
    _counter("vllm:kv_offload_store_time", "Seconds that this took."),
    _counter("vllm:kv_offload_load_bytes", "From the host to the pool: hits, and outputs that came back."),
    _counter("vllm:kv_offload_load_time", "Seconds that this took."),
    _counter("vllm:kv_offload_tiering_write_bytes", "From the host to disk."),
    _counter("vllm:kv_offload_tiering_read_bytes", "From disk to the host."),
    _counter(
        "kvreclaim:preemption_swaps", "Preemptions that kept all on the host: nothing is computed again."
    ),
    _counter("kvreclaim:swap_out_bytes", "Of the stored bytes, those of outputs that were parked."),
    _counter("kvreclaim:swap_in_bytes", "Of the loaded bytes, those of outputs that came back."),
    _counter("kvreclaim:tier_evictions", "Cached slots used for something else.", "tier"),
    _counter("kvreclaim:tier_corrupt", "Records that were not what their slot was to hold.", "tier"),
    _counter(
        "kvreclaim:tier_failed", "Transfers that failed: the disk's errors, a full one included.", "tier"
    ),
    _counter(
        "kvreclaim:tier_dropped",
        "Blocks not written: too many waited, or the disk had failed too often.",
        "tier",
    ),
    _counter("kvreclaim:tier_refused", "Times that a block found no slot: all were in use.", "tier"),
    _counter("kvreclaim:compressed_prefix_stores", "Compressed prefixes that were written to disk."),
    _counter("kvreclaim:compressed_prefix_write_bytes", "Of their files."),
    _counter("kvreclaim:compressed_prefix_loads", "Compressed prefixes that were read from disk."),
    _counter("kvreclaim:compressed_prefix_read_bytes", "Of what they hold."),
    _counter(
        "kvreclaim:compressed_prefix_hits",
        "Requests that began with a compressed prefix that had been read from disk.",
    ),
    _counter(
        "kvreclaim:compressed_prefix_corrupt",
        "Files of compressed prefixes that were damaged, or of something else.",
    ),
    _counter(
        "kvreclaim:compressed_prefix_failed",
        "Reads and writes of compressed prefixes that the disk did not make.",
    ),
    _counter(
        "kvreclaim:compressed_prefix_dropped",
        "Compressed prefixes not written: no room, too many waited, or the disk had failed too often.",
    ),
    _counter(
        "kvreclaim:compressed_prefix_evictions", "Files of compressed prefixes that made room for others."
    ),
    _counter("kvreclaim:streamed_bytes", "Of a full cache in host memory, brought to the device."),
    _counter("kvreclaim:written_bytes", "Of its blocks that got tokens, back to host memory."),
)

HTTP_COUNTERS = (
    Metric(
        "http_requests",
        Kind.COUNTER,
        "Answers by route, method and class of status, 2xx to 5xx, as vLLM counts them.",
        HTTP_LABELS,
    ),
    Metric(
        "kvreclaim:http_responses",
        Kind.COUNTER,
        "Answers by route, method and status; 499: the client left before the end.",
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
    _histogram("vllm:request_prefill_kv_computed_tokens", "Prompt tokens that were not cached.", None),
    _histogram("vllm:request_generation_tokens", "Tokens drawn for an output.", None),
    _histogram("vllm:request_max_num_generation_tokens", "Tokens of a request's longest output.", None),
    _histogram("vllm:request_params_n", "The n of a request.", OUTPUTS),
    _histogram(
        "vllm:request_params_max_tokens",
        "The max_tokens of a request that has one, no more than the context.",
        None,
    ),
    _histogram("vllm:request_num_preemptions", "Preemptions of a request.", PREEMPTIONS),
    _histogram("vllm:iteration_tokens_total", "Tokens computed in an engine step.", STEP_TOKENS),
    _histogram(
        "vllm:kv_block_lifetime_seconds", "Cached blocks: first use to reuse (sampled).", RESIDENCY_SECONDS
    ),
    _histogram("vllm:kv_block_idle_before_evict_seconds", "Last use to reuse (sampled).", RESIDENCY_SECONDS),
    _histogram("vllm:kv_block_reuse_gap_seconds", "Between two uses (sampled).", RESIDENCY_SECONDS),
    _histogram("kvreclaim:request_blocks_peak", "Most blocks that an output of a request held.", None),
)

CATALOGUE = (*GAUGES, *COUNTERS, *HTTP_COUNTERS, *HISTOGRAMS)
