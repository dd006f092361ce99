"""LLM as vLLM's users know it: prompts as mappings, a context manager, figures."""

from __future__ import annotations

import pytest
import tiny

import kvreclaim
from kvreclaim import InvalidArgumentError, SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def test_prompts_may_be_mappings(make_llm) -> None:
    llm = make_llm("llama")
    (ids,) = tiny.prompts((12,))
    (plain,) = llm.generate([ids], GREEDY)
    for prompts in ({"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], [{"prompt_token_ids": ids}, ids]):
        for out in llm.generate(prompts, GREEDY):
            assert out.prompt_token_ids == ids
            assert out.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "the keys of nothing; pass one of 'prompt' or 'prompt_token_ids'"),
        ({"text": "a"}, "the keys 'text'; pass one of"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "the keys 'prompt', 'prompt_token_ids'; pass one of"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids is a str; pass a list of token ids"),
        ({"prompt": [1]}, "prompt is a list; pass text"),
    ],
)
def test_what_a_mapping_must_hold_is_said(make_llm, prompt, message) -> None:
    with pytest.raises(InvalidArgumentError, match=message) as said:
        make_llm("llama").generate([prompt], GREEDY)
    assert said.value.field == "prompt"


def test_it_closes_at_the_end_of_a_with(make_llm, monkeypatch) -> None:
    closed = []
    with make_llm("llama") as llm:
        monkeypatch.setattr(llm.engine, "close", lambda: closed.append(True))
    assert closed == [True]


def test_figures_are_a_copy(make_llm) -> None:
    llm = make_llm("llama")
    before = llm.stats()
    llm.generate(tiny.prompts((12,)), GREEDY)
    after = llm.stats()
    assert (before.totals.steps, before.totals.generation_tokens) == (0, 0)
    assert (after.totals.generation_tokens, after.num_running, after.num_waiting) == (5, 0, 0)
    assert after.memory == llm.engine.memory.stats()
    assert after.offload is None


def test_public_names_are_exported() -> None:
    for name in ("AsyncEngine", "EngineConfig", "RequestOutput", "Retention", "SpeculativeConfig"):
        assert getattr(kvreclaim, name).__name__ == name
    assert issubclass(kvreclaim.RequestTooLongError, kvreclaim.KVReclaimError)
