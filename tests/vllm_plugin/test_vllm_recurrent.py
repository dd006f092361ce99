"""Recurrent layers beside compressed full attention: short convolutions with prefix caching, where vLLM keeps
states at ends of blocks, and Mamba2 without, where a request has one state. The policy needs statistics."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from group_checks import check_batch, check_conversation, check_preemption
from models import make_stats, random_prompts
from oracle import passes_of
from recurrent import ROTATED, make_granite, make_lfm2
from windowed import check_windowed

from kvreclaim.integrations.vllm.settings.groups import layer_kinds, most_other_blocks

CHUNK = 128
INTERVALS = {"lfm2": 64, "granite": 128}
"""A pass gives two blocks back."""


@pytest.fixture(scope="module", params=["lfm2", "granite"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    make = {"lfm2": make_lfm2, "granite": make_granite}[request.param]
    return make(tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    """The schedulers take turns."""
    more: dict[str, Any] = {"compilation_config": ROTATED}
    if model.name == "granite":
        more = {"asynchronous": True, "enable_prefix_caching": False}
    stats = make_stats(model, model.with_name(f"{model.name}.safetensors"))
    settings = {"policy": "shares(query_mixture)", "stats": str(stats), "interval": INTERVALS[model.name]}
    engine = Engine(
        model,
        compression={**settings, "budget": 128, "sinks": 4, "recent": 32},
        num_blocks=60,
        chunk=CHUNK,
        max_len=8192,
        dtype="float32",
        **more,
    )
    yield engine
    engine.close()


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> Iterator[None]:
    """No test hits what another one left."""
    yield
    assert engine.is_empty()


def test_logprobs_are_those_of_the_tokens_kept_in_attention_layers(engine: Engine, model: Path) -> None:
    """Beside requests by the engine's policy one by another, and one that is not compressed. Queries of the
    Granite take back what makes its keys unequal."""
    is_lfm2 = model.name == "lfm2"
    other = {"policy": "lagkv" if is_lfm2 else "shares(knorm)"}
    assert check_batch(engine, model, (None, other, "off"), 2) == [is_lfm2, not is_lfm2, False]


def test_a_long_prompt_holds_its_budget_and_its_states(engine: Engine) -> None:
    kinds = layer_kinds(engine.config.model_config)
    assert kinds == (2, 4, None)
    size = engine.config.cache_config.block_size
    [prompt] = random_prompts([min(4000, 2 * 60 * size)], seed=4)
    name = engine.add(prompt, 20)
    watch = engine.run()
    answer, ledger = engine.answer(name), engine.scheduler.reclaim
    assert answer.figures["tokens_evicted"] + answer.figures["kv_tokens"] == len(prompt) + 19
    most = ledger.most_blocks(8192)
    assert max(watch.used) <= most
    assert ledger.pool.others_most(8192) <= most_other_blocks(engine.config) < most


def test_what_is_computed_before_the_first_pass_is_hit_and_nothing_else(engine: Engine, model: Path) -> None:
    """The second chunk makes the first pass due; over a hit as long as that one chunk more is exact."""
    check_conversation(engine, model, (2 * CHUNK, 3 * CHUNK) if model.name == "lfm2" else (0, 0))


def test_compressed_requests_come_back_from_a_preemption(engine: Engine, model: Path) -> None:
    check_preemption(engine, model)


def test_blocks_come_with_states_of_others_in_them(engine: Engine, model: Path) -> None:
    """The content of a free block, NaN included, changes no answer. With prefix caching, a request
    moves to other blocks, because another one has its own."""
    for layer in engine.runner.reclaim.views.layers:
        layer.cache.fill_(float("nan"))
    [prompt] = random_prompts([150], seed=9)
    with engine.traced() as trace:
        names = [engine.add(prompt, 60, settings={"policy": "lagkv", "interval": 40})]
        engine.step()
        engine.step()
        names.append(engine.add(prompt, 60, settings={"policy": "lagkv", "interval": 40}))
        engine.run()
    for name in names:
        passes = passes_of(trace, name)
        assert passes
        check_windowed(model, prompt, engine.answer(name), passes)
