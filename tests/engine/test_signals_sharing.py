"""Results do not depend on what was cached, cut, forked or preempted on the way."""

from __future__ import annotations

import pytest
import tiny
import torch
from checking import check_forks, check_preemption, check_scoring, tokens
from recording import Recorder, register
from settings import small

from kvreclaim import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
WATCHED = ("queries", "mass", "all")


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> type[Recorder]:
    return register(monkeypatch)


def config(want: str, **fields):
    return small("recorder", options={"want": want, **fields.pop("options", {})}, **fields)


@pytest.mark.parametrize("want", WATCHED)
def test_a_warm_cache_changes_no_choice(want, make_llm):
    """The prompt's blocks are all there; so much is computed again that the first pass sees the same."""
    prompts = tiny.prompts((70, 33), seed=3)
    cold = make_llm(block_size=8, enable_prefix_caching=False)
    want_tokens = tokens(cold.generate(prompts, GREEDY, config(want)))
    first_seen = [s for s in Recorder.seen if s.layer == 0]
    Recorder.seen.clear()
    llm = make_llm(block_size=8)
    llm.generate(prompts, GREEDY)
    warm = llm.generate(prompts, GREEDY, config(want))
    assert tokens(warm) == want_tokens
    for got, cold_view in zip([s for s in Recorder.seen if s.layer == 0], first_seen, strict=True):
        for name in ("queries", "mass", "positions"):
            x, y = getattr(got.signals, name), getattr(cold_view.signals, name)
            assert (x is None) == (y is None)
            if x is not None:
                torch.testing.assert_close(x, y, atol=2e-4, rtol=1e-4)
    # the first passes come at 70 and at 33 tokens, and look at the last 5 queries
    hits = [out.metrics.num_cached_tokens for out in warm]
    assert hits == ([64, 24] if want == "queries" else [0, 0])


@pytest.mark.parametrize("window", [1, 6, 7, 14, 15, 500])
def test_a_hit_leaves_the_window_to_be_computed(window, make_llm):
    llm = make_llm(block_size=8)
    prompt = tiny.prompts((70,), seed=3)
    llm.generate(prompt, GREEDY)
    (out,) = llm.generate(prompt, GREEDY, config("queries", options={"window": window}))
    assert out.metrics.num_cached_tokens == max(0, 70 - window) // 8 * 8
    assert Recorder.seen[0].signals.queries.shape[1] == min(window, 70)


def test_blocks_of_a_request_that_reads_no_hit_serve_others(make_llm):
    prompt = tiny.prompts((70,), seed=3)
    llm = make_llm(block_size=8)
    expected = tokens(make_llm(block_size=8).generate(prompt, GREEDY))
    (first,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), config("mass"))
    (second,) = llm.generate(prompt, GREEDY)
    assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens) == (0, 64)
    assert tokens([second]) == expected


def test_a_request_that_will_not_be_compressed_reads_every_hit(make_llm):
    """A policy for prompts alone, and a prompt within the budget."""
    llm = make_llm(block_size=8)
    prompt = tiny.prompts((22,), seed=3)
    llm.generate(prompt, GREEDY)
    (out,) = llm.generate(prompt, GREEDY, config("all", options={"only_prompt": True}))
    assert out.metrics.num_cached_tokens == 16
    assert Recorder.seen == []


@pytest.mark.parametrize("want", WATCHED)
def test_preemption_brings_the_same_signals_again(want, make_llm):
    tight = check_preemption(make_llm, config(want, interval=16), num_blocks=26)
    assert tight.engine.signals._mass.tensor.numel() == 0


@pytest.mark.parametrize("want", WATCHED)
def test_chunks_and_company_change_nothing(want, make_llm):
    prompts = tiny.prompts((60, 45, 70, 12, 33), seed=8)
    compression = config(want, budget=80)  # over the longest prompt: all passes come while decoding
    alone = [make_llm().generate(prompt, GREEDY, compression)[0] for prompt in prompts]
    llm = make_llm(block_size=8, max_num_batched_tokens=24, max_num_seqs=3)
    order = [3, 0, 4, 2, 1]
    together = llm.generate([prompts[i] for i in order], GREEDY, compression)
    assert tokens(together) == [alone[i].outputs[0].token_ids for i in order]


@pytest.mark.parametrize("want", WATCHED)
def test_fork_then_compress_one(want, make_llm):
    check_forks(make_llm, config(want), num_blocks=11)


@pytest.mark.parametrize("want", WATCHED)
def test_scoring_ones_own_output_predicts_it(want, make_llm):
    check_scoring(make_llm, config(want))
