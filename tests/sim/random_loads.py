"""Small random loads with everything that can go wrong at once: sharing, a tight pool, passes."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from kvreclaim.plan.cost import Linear
from kvreclaim.schedule import EvictionMethod, Footprint
from kvreclaim.sim.cluster import Cluster, SimulationResult
from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.settings import Settings

COST = Linear(base=0.011, token=0.00037, kv=0.0000131, pair=0.0000019, seq=0.00023, compaction=0.0007)
"""No sum of these meets another one by chance."""


def random_settings(random: Random) -> Settings:
    size, chunk = random.choice((1, 2, 4, 8)), random.choice((5, 16, 40))
    way = random.choice(
        (
            EvictionMethod.KEEP,
            EvictionMethod.KEEP,
            EvictionMethod.COMPACT,
            EvictionMethod.COMPACT,
            EvictionMethod.CELLS,
            EvictionMethod.READS,
        )
    )
    footprint = Footprint(
        eviction_method=way,
        budget=random.choice((2, 3, 5)) * size + random.choice((0, 1)),
        interval=random.choice((size, size + 1, 7)),
        prompt_only=way is EvictionMethod.COMPACT and random.random() < 0.3,
        window=random.choice((1, 1, 3, None)),
        block_size=size,
        max_chunk=chunk,
    )
    return Settings(
        num_blocks=random.choice((12, 24, 60, 200)),
        block_size=size,
        max_num_seqs=random.choice((1, 3, 6)),
        max_num_batched_tokens=chunk,
        footprint=footprint,
        scheduling_policy=random.choice(("fcfs", "fcfs", "priority", "cache")),
        preemption_victim=random.choice(("auto", "auto", "lru", "cost")),
        enable_prefix_caching=random.random() < 0.9,
        spread=random.random() < 0.3,
    )


def random_requests(random: Random, count: int, piece: int = 8) -> list[SimRequest]:
    """Prompts are paths in a small tree, and beginnings of such; an id may have several parents."""
    paths = [[random.randrange(6)] for _ in range(3)]
    requests, now = [], 0.0
    for number in range(count):
        path = random.choice(paths)[: random.randrange(1, 9)]
        if random.random() < 0.6:
            path = [*path, *(random.randrange(6) for _ in range(random.randrange(3)))]
            paths.append(path)
        tokens = max(1, len(path) * piece - random.choice((0, 0, 1, 3, 7)))
        now += random.choice((0.0, 0.003, 0.05, 0.4)) * random.random()
        more = random.choice((0, 0, 1, 5, 11))
        requests.append(
            SimRequest(
                now,
                tokens + more,
                random.choice((1, 2, 9, 30)),
                tuple(path),
                piece,
                tokens,
                tail=("session", number % 3) if random.random() < 0.1 else None,
                priority=random.randrange(3),
            )
        )
    return requests


def simulate(settings: Settings, requests: list[SimRequest], **options: Any) -> SimulationResult:
    return Cluster(settings, COST, **options).run(requests)


def counters(outcome: SimulationResult) -> dict[str, Any]:
    """Everything that is counted; no time."""
    timeless = {"scheduled_s": None, "first_token_s": None, "end_s": None}
    return {
        "records": [replace(record, **timeless) for record in outcome.records],
        "refused": outcome.refused,
        "memory": outcome.memory,
        "steps": [replica.num_steps for replica in outcome.replicas],
        "running": [replica.running_steps for replica in outcome.replicas],
        "preemptions": [replica.preemptions for replica in outcome.replicas],
        "passes": [(replica.num_passes, replica.tokens_evicted) for replica in outcome.replicas],
    }


def times(outcome: SimulationResult) -> list[float | None]:
    return [
        time
        for record in outcome.records
        for time in (record.arrival_s, record.scheduled_s, record.first_token_s, record.end_s)
    ]
