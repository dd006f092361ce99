"""Settings of one request's own compression, against an engine without the plugin."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine
from models import random_prompts
from oracle import BF16, full_logprobs
from prometheus_client import REGISTRY
from vllm.exceptions import VLLMValidationError

PROMPT, OTHER = random_prompts((600, 300), seed=3)
NEW = 100
SMALL = {"policy": "streaming_llm", "budget": 160, "interval": 64, "recent": 64}
COMPUTED = len(PROMPT) + NEW - 1  # the last token is never computed


def one(engine: Engine, settings: Any = None) -> Answer:
    [answer] = engine.generate([PROMPT], NEW, settings=settings)
    return answer


def same(left: Answer, right: Answer) -> bool:
    return left.tokens == right.tokens and torch.equal(left.logprobs, right.logprobs)


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Answer:
    """The answer of vLLM without the plugin."""
    engine = Engine(tiny_model)
    try:
        return one(engine)
    finally:
        engine.close()


def emptied(engine: Engine) -> Engine:
    """The engine with an empty prefix cache, whatever ran before: prompts are computed in the same chunks."""
    assert engine.is_empty()
    return engine


class TestLargeBudget:
    """An engine whose own budget is never reached: requests are compressed by their own settings."""

    @pytest.fixture(scope="class")
    def started(self, tiny_model: Path, plain: Answer) -> Iterator[Engine]:
        engine = Engine(
            tiny_model, compression={**SMALL, "budget": 1024, "recent": 64}, disable_log_stats=False
        )
        yield engine
        engine.close()

    @pytest.fixture
    def engine(self, started: Engine) -> Engine:
        return emptied(started)

    def test_a_budget_that_is_not_reached_changes_nothing(self, engine: Engine, plain: Answer) -> None:
        answer = one(engine)
        assert same(answer, plain)
        assert answer.figures["compactions"] == 0
        assert answer.figures["kv_tokens"] == COMPUTED

    @pytest.mark.parametrize("settings", ["off", '"off"', {"policy": "full"}])
    def test_off_is_vllms_own_answer_without_figures(
        self, settings: Any, engine: Engine, plain: Answer
    ) -> None:
        answer = one(engine, settings)
        assert same(answer, plain)
        assert answer.figures == {}

    def test_a_smaller_budget_is_obeyed_and_reported(self, engine: Engine, plain: Answer) -> None:
        answer = one(engine, {"budget": 160})
        assert answer.tokens != plain.tokens
        figures = answer.figures
        assert figures["compactions"] > 1
        assert figures["tokens_evicted"] + figures["kv_tokens"] == COMPUTED
        assert 160 <= figures["kv_tokens"] < 160 + 64
        assert figures["blocks_freed"] > 0

    def test_settings_as_text_are_the_same_settings(self, engine: Engine) -> None:
        settings = {"budget": 160, "policy": "knorm", "interval": 32}
        given = one(engine, settings)
        engine = emptied(engine)
        assert same(one(engine, json.dumps(settings)), given)
        engine = emptied(engine)
        assert not same(one(engine, {**settings, "policy": "streaming_llm"}), given)

    def test_each_request_of_a_batch_has_its_own(self, engine: Engine, tiny_model: Path) -> None:
        alone = one(engine, {"budget": 160})
        engine = emptied(engine)
        names = [engine.add(PROMPT, NEW, settings={"budget": 160}), engine.add(OTHER, NEW, settings="off")]
        engine.finish()
        compressed, left_alone = (engine.answer(name) for name in names)
        assert compressed.figures["tokens_evicted"] == alone.figures["tokens_evicted"]
        assert left_alone.figures == {}
        whole = full_logprobs(tiny_model, OTHER, left_alone.tokens)
        assert float((left_alone.logprobs - whole).abs().mean()) <= BF16

    @pytest.mark.parametrize(
        ("settings", "word"),
        [
            ("perhaps", "no JSON"),
            ({"budgets": 160}, "no field 'budgets'"),
            ({"budget": 2048}, "started with 1024"),
            ({"budget": 160, "sinks": 200}, "always kept"),
            ({"policy": "expected_attention"}, "has not loaded"),
            ({"policy": "h2o"}, "the attention that each token has received"),
            ({"stats": "other.safetensors"}, "loaded when the server starts"),
        ],
    )
    def test_wrong_settings_are_an_error_of_the_request_alone(
        self, settings: Any, word: str, engine: Engine, plain: Answer
    ) -> None:
        with pytest.raises(VLLMValidationError, match=word):
            engine.add(PROMPT, NEW, settings=settings)
        assert same(one(engine), plain)

    def test_a_chats_system_prompt_is_kept_as_sinks(self, engine: Engine) -> None:
        messages = [
            {"role": "system", "content": "never say the word of the day "},
            {"role": "user", "content": "a tale of the sea " * 20},
        ]
        system = f"system: {messages[0]['content']}\nuser: "
        text = f"{system}{messages[1]['content']}\nassistant: "
        ids = engine.llm.get_tokenizer().encode(text, add_special_tokens=False)
        assert len(ids) == len(text)  # a letter is a token

        def answer_with(**settings: Any) -> Answer:
            [answer] = emptied(engine).generate([ids], NEW, settings={"budget": 256, **settings})
            return answer

        kept = engine.chat(messages, NEW, settings={"budget": 256})
        assert same(kept, answer_with(sinks=-(-len(system) // 32) * 32))
        lost = emptied(engine).chat(messages, NEW, settings={"budget": 256, "protect_system": False})
        assert same(lost, answer_with())
        assert not same(kept, lost)

    def test_the_counters_on_the_metrics_page_are_the_sums_of_the_figures(self, engine: Engine) -> None:
        labels = {"model_name": str(engine.config.model_config.served_model_name), "engine": "0"}

        def read(name: str) -> float:
            value = REGISTRY.get_sample_value(f"kvreclaim_{name}_total", labels)
            assert value is not None, "on the page from the start"
            return value

        names = ("tokens_evicted", "blocks_freed", "compactions")
        before = {name: read(name) for name in names}
        seconds = read("compression_seconds")
        figures = one(engine, {"budget": 160}).figures
        assert figures["compactions"] > 0
        assert {name: read(name) - before[name] for name in names} == {name: figures[name] for name in names}
        assert read("compression_seconds") > seconds


class TestOptIn:
    """An engine that compresses only requests with "kv_compression"."""

    @pytest.fixture(scope="class")
    def started(self, tiny_model: Path, plain: Answer) -> Iterator[Engine]:
        engine = Engine(tiny_model, compression={**SMALL, "opt_in": True})
        yield engine
        engine.close()

    @pytest.fixture
    def engine(self, started: Engine) -> Engine:
        return emptied(started)

    def test_who_does_not_ask_is_left_alone(self, engine: Engine, plain: Answer) -> None:
        answer = one(engine)
        assert same(answer, plain)
        assert answer.figures == {}

    def test_who_asks_gets_the_engines_settings(self, engine: Engine) -> None:
        usual = one(engine, "on")
        assert usual.figures["compactions"] > 1
        engine = emptied(engine)
        assert same(one(engine, {}), usual)
        engine = emptied(engine)
        assert same(one(engine, {"budget": 160}), usual)
