"""Drafts change how many tokens a step brings, and nothing that is answered, beside an engine without."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.engine.speculative.drafter import Seen, propose
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.demo_tasks import DEMO_TASKS

NGRAM = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
WAYS = (
    None,
    "knorm",
    "h2o",
    "snapkv(window=4)",
    "paged_eviction",
    "ada_kv(snapkv)",
    "quest",
)
FORMATS = ("auto", "int8", "int4", "fp8_e4m3", "turboquant4", "int8+int4")
KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9, seed=5),
    SamplingParams(
        temperature=0.8, seed=5, top_k=20, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.2
    ),
    SamplingParams(temperature=0.0, logit_bias={7: 3.0}, min_tokens=10, stop_token_ids=[7]),
    SamplingParams(temperature=0.7, seed=1, n=3, logprobs=2),
    SamplingParams(temperature=0.7, seed=1, n=2, allowed_token_ids=list(range(0, 270, 3))),
    SamplingParams(temperature=0.0, allowed_token_ids=list(range(1, 270, 2))),
)


def documents(count: int) -> list[list[int]]:
    """Prompts of every task of the demo model."""
    return [list(task.make(512).sample(n).prompt) for task in DEMO_TASKS.values() for n in range(count)]


def lookup(tokens: list[int], least: int, most: int, count: int) -> list[int]:
    return propose(np.array(tokens, dtype=np.int32), least, most, count)


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1]),
        ([1, 2, 5, 1, 2, 6, 1, 2], [6, 1]),  # the latest of equals
        ([1, 2, 3, 7, 2, 3, 8, 1, 2, 3], [7, 2]),  # the longest before the latest
        ([4, 4, 4], [4, 4]),  # what followed runs into what is proposed
        ([1, 2, 3], []),
        ([1], []),
        ([], []),
    ],
)
def test_what_followed_the_same_tokens(tokens, found):
    assert lookup(tokens, 2, 5, 2) == found


def test_a_lookup_is_a_function_of_the_tokens_however_they_came():
    tokens = torch.randint(5, (200,), generator=torch.Generator().manual_seed(1)).tolist()
    seen, known = Seen(), []
    for token in tokens:
        known.append(token)
        assert propose(seen.grown(known), 1, 4, 3) == lookup(known, 1, 4, 3)


def test_the_same_noise_makes_two_distributions_agree_as_often_as_they_can():
    """p = [.5, .3, .2], q = [.2, .7, .1]: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i) = .5952."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    noise = torch.empty(400_000, 3).exponential_(generator=torch.Generator().manual_seed(0))
    agree = ((p / noise).argmax(-1) == (q / noise).argmax(-1)).float().mean()
    expected = sum(1 / torch.maximum(p / p[i], q / q[i]).sum() for i in range(3))
    assert float(expected) == pytest.approx(0.5952, abs=1e-4)
    assert float(agree) == pytest.approx(float(expected), abs=4 * 0.5 / 400_000**0.5)


@pytest.fixture(scope="module")
def repeating() -> list[list[int]]:
    """Prompts with repetitions, so that drafts are accepted now and then."""
    return [prompt * 3 for prompt in tiny.prompts((7, 25, 40), seed=1)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> LLM:
    return LLM(tiny.save_model("qwen3", tmp_path_factory.mktemp("tiny")), num_blocks=300)


def answers(llm: LLM, prompts: list[list[int]], params: SamplingParams, policy: str | None) -> list[Any]:
    config = None
    if policy is not None:
        config = CompressionConfig(policy, budget=64, interval=16, sinks=2, recent=8)
    found = llm.generate(prompts, replace(params, max_tokens=40), config)
    return [
        [(o.token_ids, o.finish_reason, o.stop_reason, o.logprobs) for o in each.outputs] for each in found
    ]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("policy", WAYS)
def test_every_way_and_format_answers_the_same(plain, repeating, form, policy):
    greedy, sampled = KINDS[:2]
    drafting = plain.sibling(speculative_config=NGRAM, kv_cache_dtype=form)
    without = plain.sibling(kv_cache_dtype=form)
    for params in (greedy, sampled):
        assert answers(drafting, repeating, params, policy) == answers(without, repeating, params, policy)
    totals = drafting.engine.totals
    assert totals.speculation.num_accepted_tokens > 0
    assert totals.speculation.num_failed == 0


@pytest.mark.parametrize("params", KINDS, ids=range(len(KINDS)))
def test_every_way_of_drawing_answers_the_same(plain, repeating, params):
    drafting, without = (
        plain.sibling(speculative_config=NGRAM),
        plain.sibling(),
    )  # nothing is cached in either
    assert answers(drafting, repeating, params, None) == answers(without, repeating, params, None)
    assert drafting.engine.totals.speculation.num_draft_tokens > 0


def test_no_token_comes_behind_the_end(plain):
    prompt = [3, 4, 5] * 20
    for most in range(1, 12):
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        drafting = plain.sibling(speculative_config=NGRAM)
        [found], [want] = drafting.generate(prompt, params), plain.generate(prompt, params)
        assert found.outputs[0].token_ids == want.outputs[0].token_ids
        assert len(found.outputs[0].token_ids) == most


def test_rows_are_few_where_a_step_has_few_tokens(plain, repeating):
    drafting = plain.sibling(speculative_config=NGRAM, max_num_batched_tokens=5, max_num_seqs=3)
    small = plain.sibling(max_num_batched_tokens=5, max_num_seqs=3)
    most = []
    params = SamplingParams(temperature=0.0, max_tokens=20)
    found = drafting.generate(repeating, params, on_step=lambda step: most.append(step.num_tokens))
    assert max(most) <= 5
    assert [o.outputs[0].token_ids for o in found] == [
        o.outputs[0].token_ids for o in small.generate(repeating, params)
    ]


def test_hits_behind_drafts_hold_what_was_accepted_alone(plain, repeating):
    drafting = plain.sibling(speculative_config=NGRAM)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    [first] = drafting.generate(repeating[0], params)
    turn = repeating[0] + first.outputs[0].token_ids + [9, 8]
    [again] = drafting.generate(turn, params)
    assert again.metrics.num_cached_tokens > len(repeating[0])
    [want] = plain.sibling(enable_prefix_caching=False).generate(turn, params)
    assert again.outputs[0].token_ids == want.outputs[0].token_ids
    drafting.engine.memory.check()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_draft_model_that_is_the_model_is_always_right(temperature):
    prompts = documents(1)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=40, ignore_eos=True)
    target = LLM(demo_model(), num_blocks=400)
    speculative = {"method": "draft_model", "model": str(demo_model()), "num_speculative_tokens": 5}
    drafting = target.sibling(speculative_config=speculative)
    found, want = drafting.generate(prompts, params), target.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in want]
    totals = drafting.engine.totals.speculation
    assert totals.num_accepted_tokens > 0.95 * totals.num_draft_tokens > 0
    assert totals.num_failed == 0
    assert drafting.engine.totals.steps < target.engine.totals.steps / 3
    drafting.engine.drafter.cache.memory.check()
    assert drafting.engine.drafter.cache.memory.stats().in_use == 0


def test_a_draft_model_with_little_room_drafts_for_whom_there_is_some():
    prompts = documents(2)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    target = LLM(demo_model(), num_blocks=600)
    speculative = {"method": "draft_model", "model": str(demo_model()), "num_speculative_tokens": 4}
    drafting = target.sibling(speculative_config=speculative)
    pool = drafting.engine.drafter.cache.memory.pool
    held = pool.allocate(pool.num_free - 80)
    found, want = drafting.generate(prompts, params), target.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in want]
    assert drafting.engine.totals.speculation.num_accepted_tokens > 0
    pool.release(held)


def test_a_failing_draft_model_costs_drafts_alone(monkeypatch):
    prompts = documents(1)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    target = LLM(demo_model(), num_blocks=400)
    speculative = {"method": "draft_model", "model": str(demo_model()), "num_speculative_tokens": 4}
    drafting = target.sibling(speculative_config=speculative)

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(drafting.engine.drafter.cache.runner, "forward", broken)
    found, want = drafting.generate(prompts, params), target.generate(prompts, params)
    assert [o.outputs[0].token_ids for o in found] == [o.outputs[0].token_ids for o in want]
    assert drafting.engine.totals.speculation.num_draft_tokens == 0


def test_another_tokenizer_is_refused(tmp_path):
    speculative = {"method": "draft_model", "model": str(tiny.save_model("llama", tmp_path))}
    with pytest.raises(InvalidArgumentError, match="another tokenizer"):
        LLM(demo_model(), num_blocks=64, speculative_config=speculative)
