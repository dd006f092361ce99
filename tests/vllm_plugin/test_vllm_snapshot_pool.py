"""Snapshots in vLLM's own scheduler and block pool, without a model: see simulation.py."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
from configs import SETTINGS, make_config
from simulation import World, make_scheduler
from test_vllm_scheduler import RUNNERS, SMALL, UNEVEN, model, tokens

from kvreclaim.errors import InvalidArgumentError

__all__ = ["model"]
KEPT = {**SMALL, "snapshots": True, "recent": 31}
CHUNK = 128


def make_world(model: Path, pool: int = 40, options: Any = KEPT, **more: Any) -> World:
    return World(
        make_scheduler(model, pool, options, max_model_len=2048, max_num_batched_tokens=CHUNK, **more)
    )


def turn(world: World, name: str, prompt: list[int], max_tokens: int = 40, **more: Any) -> list[int]:
    """Run one request to its end. Returns: all its tokens."""
    request = world.add(name, prompt, max_tokens, **more)
    world.drain()
    return list(request.all_token_ids)


@RUNNERS
@pytest.mark.parametrize("options", [KEPT, {**KEPT, "policy": UNEVEN["policy"]}], ids=["equal", "uneven"])
def test_a_conversation_computes_each_token_once(
    model: Path, options: Any, asynchronous: bool, v2: bool
) -> None:
    world, random = make_world(model, options=options, asynchronous=asynchronous, v2=v2), Random(1)
    text = tokens(random, 300)
    for number in range(8):
        text += tokens(random, 50)
        before = world.hits
        text = turn(world, f"t{number}", text)
        hit = world.hits - before
        assert number == 0 or hit == (len(text) - 91) // 32 * 32
    world.check_empty()


@RUNNERS
@pytest.mark.parametrize("seed", range(4))
def test_random_conversations(model: Path, asynchronous: bool, v2: bool, seed: int) -> None:
    """Many at once in a pool that runs out of blocks, with aborts, resets and other settings: a request
    that begins with a snapshot finds exactly what was kept of its own tokens, and no block is lost."""
    random = Random(seed)
    world = make_world(
        model,
        random.choice([18, 24, 60]),
        {**KEPT, "policy": UNEVEN["policy"]} if seed % 2 else KEPT,
        asynchronous=asynchronous,
        v2=v2,
        max_num_seqs=random.choice([3, 8]),
        scheduling_policy=random.choice(["fcfs", "priority"]),
    )
    if random.random() < 0.5:  # admission without a forecast: preemptions
        world.scheduler.reclaim.room = lambda request, running: 0
    chats = [tokens(random, random.randrange(20, 300)) for _ in range(4)]
    for number in range(50):
        for _ in range(random.randrange(70)):
            world.step()
        chat, name = random.randrange(4), f"{number}"
        prompt = (chats[chat] + tokens(random, random.randrange(1, 90)))[:1800]
        wanted = random.choice([None, None, None, None, {"budget": 40}, '{"recent": 20}'])
        request = world.add(name, prompt, random.randrange(1, 80), wanted, priority=random.randrange(3))
        chats[chat] = request._all_token_ids  # as long as it has become when the next turn comes
        if random.random() < 0.1:
            world.abort(random.choice(list(world.requests)))
        if random.random() < 0.03:
            world.scheduler.reset_prefix_cache(reset_running_requests=True)
    world.drain()
    assert world.num_begun > 2
    world.check_empty()


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"kv_offloading_size": 1.0}, "--kv-offloading-size"),
        ({"kv_events_config": {"enable_kv_cache_events": True}}, "--kv-events-config"),
        (
            {
                "async_scheduling": False,
                "speculative_config": {
                    "method": "ngram",
                    "num_speculative_tokens": 2,
                    "prompt_lookup_max": 3,
                },
            },
            "--speculative-config",
        ),
    ],
)
def test_beside_snapshots_these_are_refused(options: dict[str, Any], word: str, tiny_model: Path) -> None:
    make_config(tiny_model, **options)
    with pytest.raises(
        InvalidArgumentError, match=f'{word} beside "snapshots": .*; remove it or "snapshots"'
    ):
        make_config(tiny_model, {**SETTINGS, "snapshots": True}, **options)
