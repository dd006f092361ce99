"""Models with sliding windows: the full-attention layers are compressed, the windows stay vLLM's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine
from group_checks import check_batch, check_conversation, check_preemption
from models import make_stats, random_prompts
from vllm.exceptions import VLLMValidationError
from windowed import KINDS, make_gemma

from kvreclaim.integrations.vllm.settings.groups import most_other_blocks

BLOCK, CHUNK, NUM_BLOCKS = 32, 128, 60
SETTINGS = {"budget": 128, "interval": 64, "sinks": 4, "recent": 32}
POLICIES = {"synchronous": "query_mixture", "asynchronous": "shares(query_mixture)"}
"""Heads that keep equally many tokens, and unequal ones; both by statistics."""


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_gemma(tmp_path_factory.mktemp("models") / "gemma")


@pytest.fixture(scope="module")
def stats(gemma: Path) -> Path:
    return make_stats(gemma, gemma.with_name("stats.safetensors"))


@pytest.fixture(scope="module", params=POLICIES)
def engine(request: pytest.FixtureRequest, gemma: Path, stats: Path) -> Iterator[Engine]:
    """An engine with prefix caching."""
    engine = Engine(
        gemma,
        compression={**SETTINGS, "policy": POLICIES[request.param], "stats": str(stats)},
        num_blocks=NUM_BLOCKS,
        chunk=CHUNK,
        max_len=8192,
        asynchronous=request.param == "asynchronous",
        dtype="float32",
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> Iterator[None]:
    """No test hits what another one left."""
    yield
    assert engine.is_empty()


def is_asynchronous(engine: Engine) -> bool:
    return bool(engine.config.scheduler_config.async_scheduling)


def test_logprobs_are_those_of_the_tokens_kept_in_full_layers(engine: Engine, gemma: Path) -> None:
    """Beside requests by the engine's policy one by another, and one that is not compressed."""
    uneven = check_batch(engine, gemma, (None, {"policy": "keydiff"}, "off"), KINDS.count("full_attention"))
    assert uneven == [is_asynchronous(engine), False, False]


def test_many_requests_hold_their_budgets_and_their_windows(engine: Engine) -> None:
    one = engine.add(random_prompts((1800,), seed=2)[0], 20)
    watch = engine.run()
    assert engine.answer(one).figures["tokens_evicted"] > 1500
    assert max(watch.used) <= engine.scheduler.reclaim.most_blocks(2048)
    names = [engine.add(prompt, 100) for prompt in random_prompts((500,) * 4, seed=3)]
    assert max(engine.run().running) >= 2
    assert all(engine.answer(name).figures["tokens_evicted"] > 300 for name in names)


def test_a_prompt_three_times_the_pool(engine: Engine) -> None:
    [prompt] = random_prompts([3 * NUM_BLOCKS * BLOCK], seed=4)
    name = engine.add(prompt, 20)
    watch = engine.run()
    answer = engine.answer(name)
    assert len(answer.tokens) == 20
    assert answer.figures["tokens_evicted"] + answer.figures["kv_tokens"] == len(prompt) + 19
    assert max(watch.used) <= engine.scheduler.reclaim.most_blocks(8192)


def test_what_is_computed_before_the_first_pass_is_hit_and_nothing_else(engine: Engine, gemma: Path) -> None:
    """The second chunk makes the first pass due. Over a hit as long as that one chunk more is exact."""
    check_conversation(engine, gemma, (2 * CHUNK, 3 * CHUNK))


def test_compressed_requests_come_back_from_a_preemption(engine: Engine, gemma: Path) -> None:
    check_preemption(engine, gemma)


def test_a_request_that_keeps_all_needs_room_for_its_windows_too(engine: Engine) -> None:
    """Served at the limit; beyond it its prompt and windows would not fit, however long it waits."""
    room = (NUM_BLOCKS - 1 - most_other_blocks(engine.config)) * BLOCK
    prompt = random_prompts((room,), seed=8)[0]
    with pytest.raises(VLLMValidationError, match=f"keeps all its tokens.*holds {room};"):
        engine.add(prompt, 1, settings="off")
    name = engine.add(prompt[:-4], 4, settings="off")
    watch = engine.run()
    assert len(engine.answer(name).tokens) == 4
    assert watch.preemptions == 0
