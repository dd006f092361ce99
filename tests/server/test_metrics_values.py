"""The metrics against figures that are counted by hand, from an engine that is stepped by hand."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from exposition import Scrape

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.engine.step.engine import StepResult
from kvreclaim.server.metrics.collector import Metrics
from kvreclaim.server.metrics.observer import MetricsObserver

STEP_S = 0.03
WORDS = ["k1", "v1", "k2", "v2", "k3", "v3", "k4", "v4"] * 40


@dataclass
class World:
    """An engine under a metrics observer whose clock goes on by STEP_S a step."""

    llm: LLM
    steps: list[StepResult] = field(default_factory=list)
    ended: list[Request] = field(default_factory=list)
    token_steps: dict[tuple[str, int], list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.metrics = Metrics(ServedModel.of(self.llm), "m")
        self.observer = MetricsObserver(self.llm.engine, lambda: len(self.steps) * STEP_S)

    def add(
        self, name: str, num_prompt: int, compression: CompressionConfig | None = None, **params
    ) -> Request:
        tokens = self.llm.tokenizer.encode(" ".join(WORDS[:num_prompt]))
        compressor = self.llm.compressor(compression) if compression is not None else None
        request = self.llm.engine.add_request(name, tokens, SamplingParams(**params), compressor)
        self.observer.added(self.llm.engine, request)
        return request

    def abort(self, request: Request) -> None:
        self.llm.engine.abort(request.request_id)
        self._end(request)

    def step(self) -> None:
        lengths = {(r.request_id, s.index): s.num_generated for r in self._all() for s in r.sequences}
        result = self.llm.engine.step()
        self.steps.append(result)
        for request in result.requests:
            for seq in request.sequences:
                key = (request.request_id, seq.index)
                if seq.num_generated > lengths.get(key, 0):
                    self.token_steps.setdefault(key, []).append(len(self.steps))
        self.observer.stepped(self.llm.engine, result)
        for request in result.requests:
            if request.finished:
                self._end(request)

    def run(self, check: Callable[[Scrape], None] = lambda _: None) -> Scrape:
        while self.llm.engine.has_unfinished:
            self.step()
            check(self.scrape())
        return self.scrape()

    def scrape(self) -> Scrape:
        self.metrics.take(self.observer.counted())
        return Scrape.of(self.metrics.text().decode())

    def _all(self) -> list[Request]:
        return list(self.llm.engine.requests.values())

    def _end(self, request: Request) -> None:
        request.collect_metrics()
        self.ended.append(request)
        self.observer.ended(self.llm.engine, request)

    def gaps(self) -> list[int]:
        """Steps between two tokens of an output, over all outputs."""
        return [b - a for at in self.token_steps.values() for a, b in itertools.pairwise(at)]


@pytest.fixture
def world() -> Iterator[World]:
    yield from forgetful(
        World(LLM(demo_model(), num_blocks=256, block_size=16, max_num_seqs=8, enable_prefix_caching=True))
    )


@pytest.fixture
def small_world() -> Iterator[World]:
    """A pool that runs out of blocks."""
    yield from forgetful(
        World(LLM(demo_model(), num_blocks=3, block_size=16, max_num_seqs=4, max_model_len=48))
    )


def forgetful(world: World) -> Iterator[World]:
    yield world
    assert not world.observer._progress, "the observer remembers requests that have ended"


def consistent(scrape: Scrape) -> None:
    """What must hold at every scrape."""
    hits = scrape.value("vllm:prefix_cache_hits_total")
    misses = scrape.total("kvreclaim:prefix_misses_total")
    assert hits + misses == scrape.value("vllm:prefix_cache_queries_total")
    assert scrape.total("vllm:num_preemptions_total") == scrape.total("kvreclaim:preemptions_total")
    assert scrape.total("vllm:prompt_tokens_by_source_total") == scrape.value("vllm:prompt_tokens_total")
    assert scrape.total("kvreclaim:tier_hit_tokens_total") == hits
    waiting = scrape.value("vllm:num_requests_waiting")
    assert scrape.total("vllm:num_requests_waiting_by_reason") == waiting


def test_counts_of_tokens_and_requests(world: World) -> None:
    """Plain, repeated (cached), n > 1, aborted."""
    world.add("a", 50, max_tokens=7, temperature=0, ignore_eos=True)
    world.run(consistent)
    world.add("b", 50, max_tokens=1, temperature=0, ignore_eos=True)
    world.add("c", 20, max_tokens=5, n=3, seed=1, ignore_eos=True)
    gone = world.add("d", 90, max_tokens=50, temperature=0, ignore_eos=True)
    waiting = world.add("e", 10, max_tokens=5, temperature=0)
    world.abort(waiting)
    for _ in range(3):
        world.step()
    world.abort(gone)
    scrape = world.run(consistent)

    done = [r for r in world.ended if r.request_id in "abc"]
    begun = [*done, gone]
    assert scrape.value("vllm:prompt_tokens_total") == sum(len(r.prompt_token_ids) for r in begun)
    cached = sum(r.metrics.num_cached_tokens for r in begun)
    assert cached >= 48
    assert scrape.value("vllm:prompt_tokens_cached_total") == cached
    drawn = sum(seq.num_generated for r in world.ended for seq in r.sequences)
    assert scrape.value("vllm:generation_tokens_total") == drawn == world.llm.engine.totals.generation_tokens
    assert scrape.value("vllm:request_success_total", finished_reason="length") == 5
    assert scrape.value("vllm:request_success_total", finished_reason="abort") == 2
    assert scrape.value("vllm:request_success_total", finished_reason="stop") == 0
    assert scrape.value("vllm:request_params_n_count") == 3
    assert scrape.value("vllm:request_params_n_sum") == 1 + 1 + 3
    assert scrape.value("vllm:request_generation_tokens_sum") == 7 + 1 + 3 * 5
    assert scrape.value("vllm:request_generation_tokens_count") == 5
    assert scrape.value("vllm:request_prompt_tokens_sum") == 50 + 50 + 3 * 20
    assert scrape.value("vllm:request_max_num_generation_tokens_sum") == 7 + 1 + 5
    assert scrape.value("vllm:request_params_max_tokens_sum") == 7 + 1 + 3 * 5
    assert scrape.value("kvreclaim:request_blocks_peak_sum") == sum(r.metrics.peak_blocks for r in done)
    steps = [result.stats.num_tokens for result in world.steps]
    assert scrape.value("vllm:iteration_tokens_total_count") == len(steps)
    assert scrape.value("vllm:iteration_tokens_total_sum") == sum(steps)
    assert scrape.value("kvreclaim:engine_steps_total") == len(steps)


def test_latencies_are_those_of_the_requests(world: World) -> None:
    world.add("a", 30, max_tokens=6, temperature=0, ignore_eos=True)
    world.add("b", 60, max_tokens=2, temperature=0, ignore_eos=True)
    scrape = world.run()
    all_metrics = [request.metrics for request in world.ended]
    for name, values in {
        "vllm:time_to_first_token_seconds": [m.ttft_s for m in all_metrics],
        "vllm:e2e_request_latency_seconds": [m.e2e_s for m in all_metrics],
        "vllm:request_queue_time_seconds": [m.queue_s for m in all_metrics],
        "vllm:request_prefill_time_seconds": [m.ttft_s - m.queue_s for m in all_metrics],
        "vllm:request_decode_time_seconds": [m.e2e_s - m.ttft_s for m in all_metrics],
        "vllm:request_inference_time_seconds": [m.e2e_s - m.queue_s for m in all_metrics],
        "vllm:request_time_per_output_token_seconds": [
            (m.e2e_s - m.ttft_s) / (m.num_generated_tokens - 1) for m in all_metrics
        ],
    }.items():
        assert scrape.value(f"{name}_count") == 2, name
        assert scrape.value(f"{name}_sum") == pytest.approx(sum(values), rel=1e-9), name


def test_one_sample_for_each_gap_between_tokens(small_world: World) -> None:
    """Also of outputs that were preempted and waited: the histogram is rebuilt from the steps' log."""
    for name in "abcd":
        small_world.add(name, 8, max_tokens=14, temperature=0, ignore_eos=True)
    scrape = small_world.run(consistent)
    gaps = small_world.gaps()
    assert len(gaps) == 4 * 13
    assert max(gaps) > 1, "no output ever waited"
    preemptions = sum(request.metrics.preemptions for request in small_world.ended)
    assert scrape.value("vllm:num_preemptions_total") == preemptions > 0
    assert scrape.value("vllm:request_num_preemptions_sum") == preemptions
    name = "vllm:inter_token_latency_seconds"
    assert scrape.value(f"{name}_count") == len(gaps)
    assert scrape.value(f"{name}_sum") == pytest.approx(sum(gaps) * STEP_S)
    bounds = sorted(float(labels["le"]) for labels, _ in scrape.rows(f"{name}_bucket"))
    expected = [0] * len(bounds)
    for gap in gaps:
        expected[next(i for i, bound in enumerate(bounds) if gap * STEP_S <= bound)] += 1
    assert scrape.buckets(name) == expected


def test_compression(world: World) -> None:
    """Tokens evicted and blocks freed, and their share of perfect packing."""
    policy = CompressionConfig("knorm", budget=32, interval=16, recent=8)
    world.add("a", 100, policy, max_tokens=60, temperature=0, ignore_eos=True)
    world.add("b", 80, policy, max_tokens=60, temperature=0, ignore_eos=True)
    scrape = world.run(consistent)
    freed = sum(r.metrics.blocks_freed for r in world.ended)
    perfect = sum(r.metrics.blocks_perfect for r in world.ended)
    assert freed > 8
    net = scrape.value("kvreclaim:blocks_freed_total") - scrape.value("kvreclaim:blocks_taken_total")
    assert net == freed == world.llm.engine.memory.stats().blocks_freed_by_compression
    assert scrape.value("kvreclaim:blocks_perfect_total") == perfect
    assert scrape.value("kvreclaim:reclaim_efficiency") == pytest.approx(freed / perfect)
    evicted = sum(r.metrics.tokens_evicted for r in world.ended)
    assert scrape.value("kvreclaim:tokens_evicted_total") == evicted > 0
    assert scrape.value("kvreclaim:compactions_total") == sum(r.metrics.compactions for r in world.ended)
    assert scrape.value("kvreclaim:compaction_seconds_total") > 0
    assert scrape.value("kvreclaim:scoring_seconds_total") > 0


def test_counters_never_fall_when_a_shared_prefix_is_copied(world: World) -> None:
    """The siblings' compactions take private blocks before anything comes back."""
    policy = CompressionConfig("knorm", budget=32, interval=16, recent=8)
    world.add("a", 40, policy, max_tokens=40, n=3, seed=3, ignore_eos=True)
    last: dict[str, float] = {}

    def check(scrape: Scrape) -> None:
        for name in ("kvreclaim:blocks_freed_total", "kvreclaim:blocks_taken_total"):
            assert scrape.value(name) >= last.get(name, 0)
            last[name] = scrape.value(name)

    scrape = world.run(check)
    net = last["kvreclaim:blocks_freed_total"] - last["kvreclaim:blocks_taken_total"]
    assert net == world.llm.engine.memory.stats().blocks_freed_by_compression
    assert scrape.value("kvreclaim:blocks_taken_total") > 0


def test_the_pool(world: World) -> None:
    world.add("a", 64, max_tokens=4, temperature=0, ignore_eos=True)
    world.step()
    stats = world.llm.engine.memory.stats()
    scrape = world.scrape()
    assert scrape.value("vllm:num_requests_running") == 1
    assert scrape.value("vllm:kv_cache_usage_perc") == stats.in_use / 256 > 0
    for state in ("in_use", "cached", "free"):
        assert scrape.value("kvreclaim:blocks", state=state) == getattr(stats, state)
    scrape = world.run()
    assert scrape.value("vllm:num_requests_running") == 0
    assert scrape.value("kvreclaim:blocks_peak") == world.llm.engine.memory.stats().peak_in_use
    assert scrape.value("kvreclaim:blocks", state="in_use") == 0


TIERS = [
    *("vllm:kv_offload_cpu_cache_usage_perc", "kvreclaim:tier_slots", "kvreclaim:parked_sequences"),
    *("kvreclaim:parked_slots", "vllm:external_prefix_cache_queries_total", "kvreclaim:tier_misses_total"),
    *("vllm:external_prefix_cache_hits_total", "vllm:kv_offload_store_bytes_total"),
    *("vllm:kv_offload_store_time_total", "vllm:kv_offload_load_bytes_total"),
    *("vllm:kv_offload_load_time_total", "vllm:kv_offload_tiering_write_bytes_total"),
    *("vllm:kv_offload_tiering_read_bytes_total", "kvreclaim:preemption_swaps_total"),
    *("kvreclaim:swap_out_bytes_total", "kvreclaim:swap_in_bytes_total", "kvreclaim:tier_evictions_total"),
    *("kvreclaim:tier_corrupt_total", "kvreclaim:tier_failed_total", "kvreclaim:tier_dropped_total"),
    *("kvreclaim:tier_refused_total", "kvreclaim:compressed_prefix_files"),
    *("kvreclaim:compressed_prefix_file_bytes", "kvreclaim:compressed_prefix_stores_total"),
    *("kvreclaim:compressed_prefix_write_bytes_total", "kvreclaim:compressed_prefix_loads_total"),
    *("kvreclaim:compressed_prefix_read_bytes_total", "kvreclaim:compressed_prefix_hits_total"),
    *("kvreclaim:compressed_prefix_corrupt_total", "kvreclaim:compressed_prefix_failed_total"),
    *("kvreclaim:compressed_prefix_dropped_total", "kvreclaim:compressed_prefix_evictions_total"),
    *("kvreclaim:stream_buffer_bytes", "kvreclaim:streamed_bytes_total", "kvreclaim:written_bytes_total"),
]


def test_without_tiers_their_figures_are_there_and_zero(world: World) -> None:
    world.add("a", 64, max_tokens=4, temperature=0, ignore_eos=True)
    scrape = world.run(consistent)
    for name in TIERS:
        rows = list(scrape.rows(name))
        assert rows, name
        assert all(value == 0 for _, value in rows), name


GIB = 2**30
SWAPPING = {
    "block_size": 16,
    "max_num_seqs": 4,
    "kv_offloading_size": 2e6 / GIB,
    "preemption_mode": "swap",
    "kv_load_policy": "wait_complete",
    "kv_offloading_disk_size": 4e6 / GIB,
}


SWAPPING_WITHOUT_DISK = {name: value for name, value in SWAPPING.items() if "disk" not in name}


def test_what_lies_on_host_and_disk(tmp_path: Path) -> None:
    """The same prompt: computed, hit in the pool, on the host, and by another engine on disk."""
    options = {**SWAPPING, "num_blocks": 64, "kv_offloading_disk_path": str(tmp_path)}
    llm = LLM(demo_model(), **options)
    world = World(llm)
    params = {"max_tokens": 2, "temperature": 0, "ignore_eos": True}
    for name in "abc":
        world.add(name, 60, **params)
        world.run(consistent)
        if name == "b":
            llm.engine.reset_prefix_cache(external=False)
    llm.close()
    scrape, size = world.scrape(), llm.engine.tier_stats().bytes_per_block
    num_prompt = len(world.ended[0].prompt_token_ids)
    full = (num_prompt - 1) // 16
    tokens = full * 16
    by_tier = {row["tier"]: value for row, value in scrape.rows("kvreclaim:tier_hit_tokens_total")}
    assert by_tier == {"device": tokens, "host": tokens, "disk": 0}
    assert scrape.value("vllm:prefix_cache_hits_total") == 2 * tokens
    sources = scrape.rows("vllm:prompt_tokens_by_source_total")
    assert {row["source"]: value for row, value in sources} == {
        "local_compute": 3 * num_prompt - 2 * tokens,
        "local_cache_hit": tokens,
        "external_kv_transfer": tokens,
    }
    assert scrape.value("vllm:external_prefix_cache_queries_total") == 2 * tokens
    assert scrape.value("vllm:external_prefix_cache_hits_total") == tokens
    assert scrape.value("kvreclaim:tier_misses_total", tier="host") == tokens
    assert scrape.value("kvreclaim:tier_misses_total", tier="disk") == tokens
    stored = llm.engine.memory.offload.host.pool.num_cached
    assert stored >= full
    assert scrape.value("vllm:kv_offload_store_bytes_total") == stored * size
    assert scrape.value("vllm:kv_offload_load_bytes_total") == full * size
    assert scrape.value("vllm:kv_offload_tiering_write_bytes_total") == stored * size
    assert scrape.value("vllm:kv_offload_store_time_total") > 0
    assert scrape.value("vllm:kv_offload_load_time_total") > 0
    for tier, pool in (
        ("host", llm.engine.memory.offload.host.pool),
        ("disk", llm.engine.memory.offload.disk.tier.pool),
    ):
        assert scrape.total("kvreclaim:tier_slots", tier=tier) == pool.num_blocks
        assert scrape.value("kvreclaim:tier_slots", tier=tier, state="in_use") == pool.num_in_use
    used = scrape.value("vllm:kv_offload_cpu_cache_usage_perc")
    assert used == pytest.approx(stored / llm.engine.memory.offload.host.pool.num_blocks)

    again = World(LLM(demo_model(), **options))
    again.add("d", 60, **params)
    waiting = again.scrape()
    assert waiting.value("vllm:num_requests_waiting_by_reason", reason="deferred") == 1
    assert waiting.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 0
    scrape = again.run(consistent)
    again.llm.close()
    assert scrape.value("kvreclaim:tier_hit_tokens_total", tier="disk") == tokens
    assert scrape.value("vllm:kv_offload_tiering_read_bytes_total") == full * size
    assert scrape.value("kvreclaim:tier_misses_total", tier="host") == tokens
    assert scrape.value("kvreclaim:tier_misses_total", tier="disk") == 0
    assert scrape.total("kvreclaim:tier_corrupt_total") == 0
    assert scrape.total("vllm:num_requests_waiting_by_reason") == 0


def test_outputs_that_are_parked() -> None:
    world = World(LLM(demo_model(), num_blocks=6, max_model_len=80, **SWAPPING_WITHOUT_DISK))
    seen = []

    def check(scrape: Scrape) -> None:
        consistent(scrape)
        seen.append(scrape.value("kvreclaim:parked_sequences"))
        assert (scrape.value("kvreclaim:parked_slots") > 0) <= (seen[-1] > 0)

    for name, num_prompt in zip("abc", (20, 27, 9), strict=True):
        world.add(name, num_prompt, max_tokens=40, temperature=0, ignore_eos=True)
    scrape = world.run(check)
    assert max(seen) > 0
    assert seen[-1] == 0
    swaps = scrape.value("kvreclaim:preemption_swaps_total")
    assert swaps == scrape.value("vllm:num_preemptions_total") > 0
    size = world.llm.engine.tier_stats().bytes_per_block
    out, back = (scrape.value(f"kvreclaim:swap_{way}_bytes_total") for way in ("out", "in"))
    assert out > 0 < back
    assert not out % size
    assert back <= scrape.value("vllm:kv_offload_load_bytes_total")
    assert out <= scrape.value("vllm:kv_offload_store_bytes_total")


def test_what_a_full_cache_on_the_host_moves() -> None:
    world = World(LLM(demo_model(), full_cache_host_size=8e6 / GIB, block_size=16))
    world.add("a", 40, max_tokens=4, temperature=0, ignore_eos=True)
    scrape, totals = world.run(consistent), world.llm.engine.totals
    for name in ("stream_buffer_bytes", "streamed_bytes_total", "written_bytes_total"):
        moved = getattr(totals, name.removesuffix("_total"))
        assert scrape.value(f"kvreclaim:{name}") == moved > 0


def test_cached_blocks_that_are_reused() -> None:
    world = World(LLM(demo_model(), num_blocks=8, block_size=16, max_num_seqs=1))
    for turn in range(6):
        tokens = world.llm.tokenizer.encode(" ".join(WORDS[turn % 3 :][:40]))
        params = SamplingParams(max_tokens=30, temperature=0)
        world.observer.added(world.llm.engine, world.llm.engine.add_request(str(turn), tokens, params))
        world.run()
    evictions = world.llm.engine.memory.stats().prefix_evictions
    assert world.scrape().value("kvreclaim:prefix_evictions_total") == evictions > 0
