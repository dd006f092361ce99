"""The scheduler side against vLLM's own scheduler and block pool, without a model: see simulation.py."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from list_worker import WindowWorker
from simulation import World, make_scheduler

from kvreclaim.errors import InvalidArgumentError

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 16384,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
}
SMALL = {"policy": "streaming_llm", "budget": 64, "interval": 40, "sinks": 4, "recent": 16}
UNEVEN = {**SMALL, "policy": "shares(knorm)"}
RUNNERS = pytest.mark.parametrize(
    ("asynchronous", "v2"), [(False, False), (True, False), (True, True)], ids=["sync", "async", "async-v2"]
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a config alone: no weights are read."""
    path = tmp_path_factory.mktemp("config")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return path


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(8, 500) for _ in range(count)]


SMALLER: list[Any] = ['{"budget": 40}', {"budget": 33, "interval": 1}, {"protect_prompt": True}]
WANTED: list[Any] = [None, None, None, "on", *SMALLER]


@RUNNERS
@pytest.mark.parametrize("window", [None, WindowWorker.WINDOW], ids=["full", "windows"])
@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_leaves_every_block_where_it_belongs(
    model: Path, asynchronous: bool, v2: bool, window: int | None, seed: int
) -> None:
    random = Random(seed)
    pool = random.choice([14, 20, 40]) if window is None else random.choice([45, 70])
    world = World(
        make_scheduler(
            model,
            pool,
            UNEVEN if seed % 2 else SMALL,
            asynchronous=asynchronous,
            v2=v2,
            window=window,
            max_model_len=2048,
            max_num_batched_tokens=random.choice([64, 128, 200]),
            max_num_seqs=random.choice([2, 8]),
            scheduling_policy=random.choice(["fcfs", "priority"]),
            prefix_cache_retention_interval=0 if window is None else random.choice([0, 64, None]),
        ),
        seed,
    )
    run_traffic(world, random)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_beside_recurrent_states(
    model: Path, asynchronous: bool, caching: bool, seed: int
) -> None:
    random = Random(seed)
    world = World(
        make_scheduler(
            model,
            random.choice([40, 60]),
            UNEVEN if seed % 2 else SMALL,
            asynchronous=asynchronous,
            states=True,
            enable_prefix_caching=caching,
            max_model_len=2048,
            max_num_batched_tokens=random.choice([64, 128, 200]),
            max_num_seqs=random.choice([2, 8]),
            scheduling_policy=random.choice(["fcfs", "priority"]),
            prefix_cache_retention_interval=random.choice([0, 64, None]),
        ),
        seed,
    )
    run_traffic(world, random)


def run_traffic(world: World, random: Random) -> None:
    if random.random() < 0.5:  # admission without a forecast: preemptions
        world.scheduler.reclaim.room = lambda request, running: 0
    prefixes = [tokens(random, random.choice([40, 100, 300])) for _ in range(3)]
    for number in range(40):
        for _ in range(random.randrange(12)):
            world.step()
        prompt = random.choice(prefixes)[: random.randrange(1, 400)]
        prompt = prompt + tokens(random, random.randrange(1, 200))
        if random.random() < 0.2 and world.requests:
            prompt = list(random.choice(list(world.requests.values()))._all_token_ids)[:900]
        wanted, longest = random.choice(WANTED), 150
        if random.random() < 0.2 and len(prompt) < 250:
            wanted, longest = "off", 100
        world.add(
            f"r{number}",
            prompt,
            random.randrange(1, longest),
            wanted,
            stop=random.random() < 0.3,
            priority=random.randrange(3),
        )
        if random.random() < 0.15:
            world.abort(random.choice(list(world.requests)))
        if random.random() < 0.05:
            world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.drain()
    assert world.num_passes > 20
    world.check_empty()


def test_shared_blocks_are_not_written_though_the_pool_is_full(model: Path) -> None:
    """Two requests with one prompt, and no free block: one of them is preempted for the other's pass."""
    world = World(make_scheduler(model, 40, SMALL, max_model_len=2048, max_num_batched_tokens=512))
    prompt = tokens(Random(1), 320)
    world.add("a", prompt, 100)
    world.add("b", [*prompt, 9], 100)
    ledger = world.scheduler.reclaim
    compress = ledger.compress
    taken: list[Any] = []

    def starved(running: Any) -> Any:
        if len(running) == 2 and not taken:
            taken.extend(world.pool.get_new_blocks(world.pool.get_num_free_blocks()))
        return compress(running)

    ledger.compress = starved
    world.check_pool = lambda: None  # type: ignore[method-assign]  # blocks are held by no request
    while not taken:
        world.step()
    assert not world.num_passes or world.preemptions() == 1
    while not world.num_passes:
        world.step()
    assert world.preemptions() == 1
    world.pool.free_blocks(taken)
    del world.check_pool
    world.drain()
    world.check_empty()


def test_a_hit_leaves_room_for_a_chunk_and_its_windows(model: Path) -> None:
    """28 of 39 blocks are in the prefix index; 2 are for the chunk and 5 for each of two windows."""
    more = {"prefix_cache_retention_interval": None, "max_num_batched_tokens": 64, "max_model_len": 2048}
    world = World(make_scheduler(model, 40, SMALL, window=WindowWorker.WINDOW, **more))
    head, tail = tokens(Random(1), 28 * 32), tokens(Random(2), 500)
    world.add("a", head, 2, "off")
    world.drain()
    world.add("b", head + tail, 20)
    world.drain()
    assert world.hits == (39 - 2 - 2 * 5) * 32
    world.check_empty()


def test_windows_are_hit_where_a_request_was_exact(model: Path) -> None:
    """vLLM would keep those before the prompt's end alone; the first pass comes in the third chunk."""
    world = World(make_scheduler(model, 60, SMALL, window=33, max_num_batched_tokens=64, max_model_len=2048))
    world.worker.WINDOW = 33
    prompt = tokens(Random(1), 300)
    for name in ("a", "b"):
        world.add(name, prompt, 40)
        world.drain()
    assert world.hits == 128
    world.check_empty()


def test_a_state_is_hit_where_a_request_was_exact(model: Path) -> None:
    """vLLM would keep that before the prompt's end alone; the first pass comes after the second chunk."""
    more = {"max_num_batched_tokens": 64, "max_model_len": 2048}
    world = World(make_scheduler(model, 60, SMALL, states=True, **more))
    prompt = tokens(Random(1), 300)
    for name in ("a", "b"):
        world.add(name, prompt, 40)
        world.drain()
    assert world.hits == 128
    world.check_empty()


def test_a_pool_below_budget_interval_and_a_chunk_is_refused(model: Path) -> None:
    with pytest.raises(InvalidArgumentError, match=r"has 8 blocks .* holds up to 12: .*max-num-batched"):
        make_scheduler(model, 9, SMALL | {"budget": 200}, max_model_len=2048, max_num_batched_tokens=128)
