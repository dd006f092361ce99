"""Requests that arrive together compute what they share once, and answer as if each had computed it."""

from __future__ import annotations

import pytest
import tiny
from settings import assert_idle, with_options

from kvreclaim import LLM, CompressionConfig, SamplingParams

TEXT, *TAILS = tiny.prompts((160, 9, 14, 20, 3), seed=21)
PROMPTS = [TEXT + tail for tail in TAILS]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
ENOUGH = 1 << 30


def answers(llm, prompts, compression=None, **options):
    outputs = llm.generate(with_options(prompts, **options), PARAMS, compression)
    assert all(output.error is None for output in outputs)
    return [output.outputs[0].token_ids for output in outputs]


def computed_each(make_llm, prompts, compression=None, **settings):
    """Prompt tokens computed and answers: of an engine that waits for nothing, and of one that waits."""
    found = []
    for least in (ENOUGH, 64):
        llm = make_llm(**settings)
        llm.engine.scheduler.in_flight.least_tokens = least
        tokens = answers(llm, prompts, compression=compression)
        found.append((llm.engine.totals.prompt_tokens, tokens))
        assert_idle(llm)
    return found


@pytest.mark.parametrize("policy", ["fcfs", "priority", "cache"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 256}, {"kv_offloading_size": 0.001}])
def test_the_same_answers_and_less_computed(policy, settings, make_llm):
    (twice, expected), (once, found) = computed_each(make_llm, PROMPTS, scheduling_policy=policy, **settings)
    assert found == expected
    assert once == len(TEXT) + sum(map(len, TAILS))
    assert twice > once


def test_equal_prompts(make_llm):
    (twice, expected), (once, found) = computed_each(make_llm, [TEXT] * 6)
    assert found == expected
    assert twice == 6 * len(TEXT)
    assert once == len(TEXT) + 5 * 16  # a prompt's last block is computed for its logits


@pytest.mark.parametrize("family", ["qwen3-next", "jamba"])
@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 100}, {"max_num_seqs": 2}])
def test_recurrent_layers(family, settings, tiny_dir):
    """A state is kept where the prompts part, for those that wait; without room for states none waits."""
    found = []
    for checkpoints in (0, 8):
        given = {"num_blocks": 200, "state_checkpoints": checkpoints, **settings}
        llm = LLM(tiny_dir(family), dtype="float32", device="cpu", **given)
        tokens = answers(llm, PROMPTS)
        found.append((llm.engine.totals.prompt_tokens, tokens))
        assert (llm.engine.scheduler.in_flight.num_waits > 0) == (checkpoints > 0)
    (twice, expected), (once, tokens) = found
    assert tokens == expected == tiny.greedy(tiny_dir(family), PROMPTS, 12)
    assert twice == sum(map(len, PROMPTS))
    assert once == len(TEXT) + sum(map(len, TAILS))


@pytest.mark.parametrize("policy", ["knorm", "query_mixture", "h2o", "quest"])
def test_under_compression(policy, make_llm):
    """Up to the first pass all is exact, and what needs all signals hits nothing, so it does not wait."""
    compression = CompressionConfig(policy, budget=48, interval=16, sinks=2, recent=4)
    (twice, expected), (once, found) = computed_each(make_llm, PROMPTS, compression)
    assert found == expected
    assert (once == twice) == (policy == "h2o")


@pytest.mark.parametrize("policy", ["knorm", "h2o"])
def test_a_compressed_document_that_several_ask_for_at_once(policy, make_llm):
    compression = CompressionConfig(policy, budget=48, interval=16, sinks=2, recent=4)
    alone = make_llm(enable_prefix_caching=False, prefix_snapshot_fraction=0.0)
    expected = [
        answers(alone, [prompt], compression=compression, compress_prompt_at=len(TEXT))[0]
        for prompt in PROMPTS
    ]
    llm = make_llm()
    found = answers(llm, PROMPTS, compression=compression, compress_prompt_at=len(TEXT))
    assert found == expected
    assert llm.engine.totals.prompt_tokens == len(TEXT) + sum(map(len, TAILS))
    assert llm.engine.scheduler.snapshots.num_hits == len(PROMPTS) - 1


def test_a_request_for_prompt_logprobs_waits_for_no_other(make_llm):
    llm = make_llm()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    llm.generate([TEXT, TEXT], params)
    assert llm.engine.scheduler.in_flight.num_waits == 0
    assert llm.engine.totals.prompt_tokens == 2 * len(TEXT)
