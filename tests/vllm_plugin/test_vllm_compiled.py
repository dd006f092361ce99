"""The same under torch.compile: the passes run outside of the compiled graph, on buffers that it reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine
from models import random_prompts
from oracle import check_logprobs, full_logprobs, passes_of

SETTINGS = {"policy": "query_mixture", "budget": 128, "interval": 64, "sinks": 4, "recent": 32}
OUTPUT = 160


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tiny_stats: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Compiled by inductor into a cache of its own: nothing that an earlier run compiled is used."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_CI_ENV", "0")  # 1 traces, but does not compile
        patch.setenv("VLLM_CACHE_ROOT", str(tmp_path_factory.mktemp("vllm")))
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        compression = {**SETTINGS, "stats": str(tiny_stats)}
        engine = Engine(tiny_model, compression=compression, enforce_eager=False)
        yield engine
        engine.close()


def test_is_compiled(engine: Engine) -> None:
    compilation = engine.config.compilation_config
    assert compilation.backend == "inductor"
    assert compilation.mode.name == "DYNAMO_TRACE_ONCE"


@pytest.mark.parametrize(
    "settings", [None, {"policy": "streaming_llm"}, {"protect_prompt": True, "mode": "union"}]
)
def test_logprobs_are_those_of_the_tokens_kept(engine: Engine, tiny_model: Path, settings: Any) -> None:
    prompts = random_prompts((600, 450), seed=1)
    with engine.traced() as trace:
        answers = engine.generate(prompts, OUTPUT, settings=settings)
    for prompt, answer in zip(prompts, answers, strict=True):
        passes = passes_of(trace, answer.request_id)
        assert len(passes) >= 4
        check_logprobs(tiny_model, prompt, answer.tokens, answer.logprobs, passes)
    assert engine.is_empty()


def test_a_request_that_opts_out_beside_one_that_does_not(engine: Engine, tiny_model: Path) -> None:
    prompts = random_prompts((400, 350), seed=2)
    with engine.traced() as trace:
        whole = engine.add(prompts[0], OUTPUT, settings="off")
        other = engine.add(prompts[1], OUTPUT)
        engine.finish()
    answer = engine.answer(whole)
    assert passes_of(trace, whole) == []
    assert (full_logprobs(tiny_model, prompts[0], answer.tokens) - answer.logprobs).abs().mean() <= 0.03
    answer = engine.answer(other)
    check_logprobs(tiny_model, prompts[1], answer.tokens, answer.logprobs, passes_of(trace, other))
