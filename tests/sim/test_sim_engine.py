"""Against the engine that computes: the same steps, preemptions, hits and blocks, to the last one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import tiny

from kvreclaim import LLM, SamplingParams
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.spec.traits import footprint
from kvreclaim.memory.groups.state_slots import StateSizes
from kvreclaim.plan.cost import Linear
from kvreclaim.schedule import Footprint
from kvreclaim.sim.cluster import Cluster, SimulationResult
from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.settings import Settings

PIECE = 8
CHUNK = 24
BLOCK_BYTES = 2 * 2 * 2 * 8 * 16 * 4
STATE_BYTES = 1536
"""K and V, 2 layers, 2 KV heads, 8 slots of 16 numbers in fp32."""
POLICIES = {
    "full": None,
    "knorm": {"budget": 24, "interval": 8, "sinks": 2, "recent": 6},
    "snapkv(window=4)": {"budget": 21, "interval": 5, "sinks": 1, "recent": 6},
    "ada_kv(knorm)": {"budget": 24, "interval": 8, "sinks": 2, "recent": 6},
}


@cache
def piece(content: int) -> tuple[int, ...]:
    """The tokens that a content id stands for."""
    return tuple(Random(1000 + content).choices(range(2, tiny.VOCAB_SIZE - 1), k=PIECE))


@dataclass
class Load:
    """Requests as the simulator knows them, and their prompts as the engine does. Times are steps."""

    requests: list[SimRequest]
    prompts: list[list[int]]


def random_load(random: Random, count: int) -> Load:
    requests, prompts, step = [], [], 0
    paths = [[random.randrange(4)] for _ in range(3)]
    for number in range(count):
        path = random.choice(paths)[: random.randrange(1, 7)]
        if random.random() < 0.7:
            path = [*path, random.randrange(4)]
            paths.append(path)
        step += random.choice((0, 0, 1, 2, 7, 30))
        own = random.randrange(1, 20)
        prompt = [token for content in path for token in piece(content)]
        prompt += Random(f"own {number}").choices(range(2, tiny.VOCAB_SIZE - 1), k=own)
        prompts.append(prompt)
        output = random.choice((1, 3, 20, 60))
        requests.append(SimRequest(float(step), len(prompt), output, tuple(path), PIECE, len(path) * PIECE))
    return Load(requests, prompts)


def serve(load: Load, directory: Path, policy: str, options: dict[str, Any]) -> dict[str, Any]:
    """Serve the load with the engine. Returns: its counts."""
    llm = LLM(directory, dtype="float32", device="cpu", spread_compression=False, **options)
    engine, settings = llm.engine, POLICIES[policy]
    compressor = None if settings is None else llm.compressor(CompressionConfig(policy, **settings))
    requests, step, waiting = [], 0, list(zip(load.requests, load.prompts, strict=True))
    peak = 0
    while waiting or engine.has_unfinished:
        if not engine.has_unfinished:
            step = max(step, int(waiting[0][0].arrival_s))
        while waiting and waiting[0][0].arrival_s <= step:
            sim_request, prompt = waiting.pop(0)
            params = SamplingParams(
                temperature=1.0, seed=len(requests), max_tokens=sim_request.num_output, ignore_eos=True
            )
            requests.append(engine.add_request(f"r{len(requests)}", prompt, params, compressor))
        engine.step()
        peak = max(peak, engine.memory.pool.peak_in_use)
        step += 1
    metrics = [request.output().metrics for request in requests]
    assert all(request.error is None for request in requests)
    return {
        "steps": engine.totals.steps,
        "preemptions": Counter({k: v for k, v in engine.totals.preemptions.items() if v}),
        "passes": engine.totals.compactions,
        "tokens evicted": engine.totals.tokens_evicted,
        "memory": engine.memory.stats(),
        "peak blocks": [m.peak_blocks for m in metrics],
        "freed": [m.blocks_freed for m in metrics],
        "compactions": [m.compactions for m in metrics],
        "hits": [m.num_cached_tokens for m in metrics],
        "preempted": [m.preemptions for m in metrics],
        "swaps": engine.totals.swaps,
    }


def simulated(outcome: SimulationResult) -> dict[str, Any]:
    """The same of a simulation."""
    replica, records = outcome.replicas[0], outcome.records
    return {
        "steps": replica.num_steps,
        "preemptions": replica.preemptions,
        "passes": replica.num_passes,
        "tokens evicted": replica.tokens_evicted,
        "memory": outcome.memory[0],
        "peak blocks": [record.peak_blocks for record in records],
        "freed": [record.blocks_freed for record in records],
        "compactions": [record.passes for record in records],
        "hits": [record.hit_tokens for record in records],
        "preempted": [record.preemptions for record in records],
        "swaps": replica.swaps,
    }


def limits(policy: str, block_size: int) -> Footprint:
    given = POLICIES[policy]
    if given is None:
        return Footprint(block_size=block_size, max_chunk=CHUNK)
    text = f"{policy}:{','.join(f'{name}={value}' for name, value in given.items())}"
    return footprint(text, block_size=block_size, max_chunk=CHUNK)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_the_engine(policy: str, seed: int, tiny_dir) -> None:
    random = Random(f"{policy} {seed}")
    size, num_blocks = random.choice(((4, 28), (8, 16), (8, 40)))
    options = {"block_size": size, "num_blocks": num_blocks, "max_num_seqs": 4}
    load = random_load(random, 24)
    found = serve(load, tiny_dir("qwen3"), policy, {**options, "max_num_batched_tokens": CHUNK})
    for leaps in (True, False):
        settings = Settings(
            **options,
            max_num_batched_tokens=CHUNK,
            max_model_len=512,
            footprint=limits(policy, size),
            leaps=leaps,
        )
        assert simulated(Cluster(settings, Linear(1.0)).run(load.requests)) == found


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize("policy", ["full", "knorm"])
@pytest.mark.parametrize("seed", range(2))
def test_counts_with_slots_on_the_host(seed: int, policy: str, mode: str, tiny_dir) -> None:
    """Prefixes come back from the host, preempted sequences are moved there or not."""
    random = Random(f"host {policy} {seed}")
    options = {"block_size": 8, "num_blocks": 16, "max_num_seqs": 4, "preemption_mode": mode}
    load = random_load(random, 24)
    size = 60 * BLOCK_BYTES / 2**30
    engine = {**options, "max_num_batched_tokens": CHUNK, "kv_offloading_size": size}
    found = serve(load, tiny_dir("qwen3"), policy, engine)
    settings = Settings(
        **options,
        max_num_batched_tokens=CHUNK,
        max_model_len=512,
        footprint=limits(policy, 8),
        host_blocks=60,
    )
    outcome = Cluster(settings, Linear(1.0)).run(load.requests)
    assert simulated(outcome) == found
    assert sum(record.loaded_tokens for record in outcome.records) > 0
    if policy == "full":  # a budget leaves room
        assert outcome.preemptions.total() > 0
        assert (outcome.replicas[0].swaps > 0) == (mode == "swap")


@pytest.mark.parametrize(
    ("seed", "policy", "states"),
    [
        (0, "full", {}),
        (1, "full", {"state_checkpoint_interval": 16, "state_checkpoints": 9}),
        (0, "full", {"state_checkpoints": 0}),
        (1, "knorm", {"state_checkpoints": 2}),
    ],
)
def test_counts_of_a_model_with_recurrent_layers(seed: int, policy: str, states: dict, tiny_dir) -> None:
    """Steps end where a state is kept, and hits begin there."""
    random = Random(f"states {seed}")
    size, num_blocks = random.choice(((4, 36), (8, 20), (8, 40)))
    options = {"block_size": size, "num_blocks": num_blocks, "max_num_seqs": 4}
    load = random_load(random, 15)
    engine = {**options, "max_num_batched_tokens": CHUNK, **states}
    found = serve(load, tiny_dir("lfm2"), policy, engine)
    kept, interval = states.get("state_checkpoints"), states.get("state_checkpoint_interval", 0)
    settings = Settings(
        **options,
        max_num_batched_tokens=CHUNK,
        max_model_len=512,
        footprint=limits(policy, size),
        states=StateSizes.of(4, checkpoints=kept, interval=interval),
    )
    for leaps in (True, False):
        cluster = Cluster(replace(settings, leaps=leaps), Linear(1.0))
        assert simulated(cluster.run(load.requests)) == found
        assert (cluster.replicas[0].num_leaps > 0) == leaps
    if policy == "full":
        assert (sum(found["hits"]) > 0) == (kept != 0)


@pytest.mark.parametrize(
    ("mode", "on_host"), [("swap", 0), ("recompute", 0), ("swap", 3), ("recompute", 40), ("swap", 40)]
)
def test_states_go_to_the_host_and_come_back(mode: str, on_host: int, tiny_dir) -> None:
    """on_host: states behind prefixes, so that they are found there, too."""
    options = {"block_size": 8, "num_blocks": 16, "max_num_seqs": 4, "preemption_mode": mode}
    load = random_load(Random("states host"), 15)
    blocks, states = 60 * 2048, on_host * STATE_BYTES
    engine = {
        **options,
        "max_num_batched_tokens": CHUNK,
        "kv_offloading_size": (blocks + states + 2) / 2**30,
        "kv_offloading_state_fraction": (states + 1) / (blocks + states + 2),
    }
    found = serve(load, tiny_dir("lfm2"), "full", engine)
    settings = Settings(
        **options,
        max_num_batched_tokens=CHUNK,
        max_model_len=512,
        footprint=limits("full", 8),
        host_blocks=60,
        host_states=on_host,
        states=StateSizes.of(4, each=3),
    )
    outcome = Cluster(settings, Linear(1.0)).run(load.requests)
    assert simulated(outcome) == found
    assert (found["swaps"] > 0) == (mode == "swap")
    assert (sum(record.loaded_tokens for record in outcome.records) > 0) == (on_host > 0)


def test_the_loads_share_and_preempt(tiny_dir) -> None:
    """Totals of the loads above, by the simulator alone, which is equal."""
    total: Counter[str] = Counter()
    for policy in POLICIES:
        for seed in range(3):
            random = Random(f"{policy} {seed}")
            size, num_blocks = random.choice(((4, 28), (8, 16), (8, 40)))
            settings = Settings(num_blocks, size, 4, CHUNK, 512, limits(policy, size))
            outcome = Cluster(settings, Linear(1.0)).run(random_load(random, 24).requests)
            total["hits"] += outcome.memory[0].prefix_hit_tokens
            total["freed"] += outcome.memory[0].blocks_freed_by_compression
            total["preemptions"] += outcome.preemptions.total()
    assert min(total.values()) > 20, total


@pytest.mark.parametrize(
    ("policy", "steps", "crowded", "preemptions", "held"),
    [(None, 3422, 6.317764804003336, 35, 80), ("triattention:budget=256,interval=16", 1026, 12.0, 0, 17)],
)
def test_a_published_run(policy, steps, crowded, preemptions, held) -> None:
    """18 requests of 256 + 1,024 tokens in 320 blocks, as an engine with 26 M parameters counted them."""
    chosen = Footprint() if policy is None else footprint(policy)
    cluster = Cluster(Settings(320, max_num_seqs=18, footprint=chosen), Linear(1.0))
    outcome = cluster.run([SimRequest(0.0, 256, 1024) for _ in range(18)])
    replica = cluster.replicas[0]
    assert replica.num_steps == steps
    assert replica.running_crowded / replica.crowded_steps == crowded
    assert outcome.preemptions.total() == preemptions
    assert outcome.memory[0].peak_in_use == 320
    assert max(record.peak_blocks for record in outcome.records) == held
