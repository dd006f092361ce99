"""Budgets that choose themselves, and what verify does not go with, one sentence each."""

from __future__ import annotations

import pytest
from settings import small, with_options
from test_verify import assert_left_nothing, recall_prompt
from verifying import GREEDY, PROMPTS, drafting, on_host, results

from kvreclaim import LLM, BeamSearchParams, CompressionConfig, SamplingParams, demo_model
from kvreclaim.chunks import Chunk
from kvreclaim.compression_settings import BUDGETS
from kvreclaim.engine.features.verification.feature import budgets_of
from kvreclaim.engine.request.verify import FULL_ROUNDS, Verify
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.schedule import EvictionMethod, Footprint

POOLED = "pooled(alpha=0.9, rows=16, first=32, last=6, layers=0, block=16, sinks=1, local=1)"


def chosen_itself(**fields) -> CompressionConfig:
    return drafting("snapkv", **{"budget": "auto", **fields})


def fresh(llm: LLM, num_tokens: int = 200) -> Verify:
    compressor = llm.compressor(chosen_itself())
    config = compressor.config
    footprint = Footprint(EvictionMethod.COMPACT, config.budget, config.interval, block_size=16)
    return Verify(compressor, footprint, 8, budgets_of(compressor, num_tokens))


def test_its_steps_end_with_the_first_that_holds_everything(make_llm):
    compressor = make_llm().compressor(chosen_itself())
    assert compressor.config.budget == BUDGETS[0] == 64
    assert budgets_of(compressor, 64) == (64,)
    assert budgets_of(compressor, 65) == (64, 96)
    assert budgets_of(compressor, 200) == (64, 96, 128, 192, 256)
    assert budgets_of(compressor, 10**6) == BUDGETS
    given = make_llm().compressor(drafting("snapkv"))
    assert budgets_of(given, 200) == ()


def test_it_begins_with_the_first_step_above_what_is_always_kept():
    assert CompressionConfig("snapkv", "auto", verify=True).budget == 192
    assert CompressionConfig("snapkv", "auto", sinks=0, recent=48, verify=True).budget == 64
    assert CompressionConfig("snapkv", "auto", sinks=0, recent=49, verify=True).budget == 96


def test_it_rises_with_each_round_that_is_refused_and_falls_after_full_ones(make_llm):
    verify = fresh(make_llm())

    def stand():
        assert verify.footprint.budget == verify.compressor.budget == verify.compressor.config.budget
        return verify.compressor.config.budget

    probable = [0.9] * 8
    verify.note(probable, 8)
    assert (stand(), verify.is_short) == (64, False)
    verify.note(probable, 3)
    assert (stand(), verify.is_short, verify.num_full) == (96, True, 0)
    verify.note(probable, 0)
    assert stand() == 128
    verify.is_short = False
    for _ in range(FULL_ROUNDS - 1):
        verify.note(probable, 8)
    assert stand() == 128
    verify.note(probable, 8)
    assert (stand(), verify.is_short, verify.num_full) == (96, False, 0)
    for _ in range(10):
        verify.note(probable, 7)
    assert stand() == 256
    for _ in range(10 * FULL_ROUNDS):
        verify.note(probable, 8)
    assert stand() == 64
    assert verify.num_rounds == 13 + 11 * FULL_ROUNDS
    assert verify.num_drafted == 8 * verify.num_rounds


def test_a_budget_that_is_given_stays(make_llm):
    compressor = make_llm().compressor(drafting("snapkv"))
    verify = Verify(compressor, Footprint(EvictionMethod.COMPACT, 24, 8), 8)
    for accepted in (0, *[8] * 30, 2):
        verify.note([0.5] * 8, accepted)
    assert verify.compressor is compressor
    assert not verify.is_short


@pytest.mark.parametrize("host", [False, True], ids=["pool", "host"])
def test_whatever_it_chooses_answers_are_the_full_caches(host, make_llm):
    llm = make_llm()
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=100, ignore_eos=True, logprobs=2)
    expected = results(llm.generate(PROMPTS, params))
    verified = on_host(llm) if host else llm.sibling()
    engine, compressor = verified.engine, llm.compressor(chosen_itself(verify_tokens=4))
    requests = [engine.add_request(f"r{i}", p, params, compressor) for i, p in enumerate(PROMPTS)]
    budgets = [set() for _ in requests]
    while engine.has_unfinished:
        engine.step()
        for seen, request in zip(budgets, requests, strict=True):
            seen.add(request.verify.compressor.config.budget)
    tokens = [request.sequences[0].token_ids[len(p) :] for request, p in zip(requests, PROMPTS, strict=True)]
    assert tokens == [list(outputs[0][1]) for outputs in expected]
    assert any(len(seen) > 1 for seen in budgets)
    assert all(seen <= set(BUDGETS) for seen in budgets)
    assert engine.totals.speculation.num_failed == 0
    assert_left_nothing(verified)


def test_it_stays_small_where_drafts_are_good():
    llm = LLM(demo_model(), num_blocks=200, device="cpu")
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    expected = results(llm.generate([recall_prompt(0)], params))
    config = CompressionConfig("query_mixture", "auto", 32, 4, 16, verify=True, verify_tokens=8)
    engine = llm.sibling().engine
    request = engine.add_request("r", recall_prompt(0), params, llm.compressor(config))
    while engine.has_unfinished:
        engine.step()
    assert list(request.sequences[0].token_ids[len(recall_prompt(0)) :]) == list(expected[0][0][1])
    assert request.verify.num_accepted > 40
    assert request.verify.compressor.config.budget <= 256


def test_without_verify_a_budget_is_to_be_given():
    with pytest.raises(InvalidArgumentError, match="budget is 'auto', but verify is False"):
        CompressionConfig("snapkv", "auto")


@pytest.mark.parametrize("tokens", [0, 65, 1.5, "four"])
def test_drafts_are_a_whole_number_within_bounds(tokens):
    with pytest.raises(InvalidArgumentError, match="verify_tokens is"):
        drafting(verify_tokens=tokens)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("full", "policy full evicts nothing, so there is nothing to draft from"),
        ("streaming_llm(positions=cache)", "turns keys to positions relative to the cache"),
        ("oracle", "policy oracle needs the text to come"),
    ],
)
def test_policies_that_cannot_draft(policy, words, make_llm):
    llm = make_llm()
    with pytest.raises(InvalidArgumentError, match=words) as refusal:
        llm.generate(PROMPTS, GREEDY, drafting(policy))
    one_sentence(refusal)
    assert_left_nothing(llm)


@pytest.mark.parametrize(
    ("policy", "words"),
    [
        ("quest", "policy quest holds on the device as much as the full cache"),
        ("kvzap", "policy kvzap keeps scores next to the slots of the full cache"),
    ],
)
def test_policies_that_cannot_where_full_caches_lie_on_the_host(policy, words, make_llm):
    host = on_host(make_llm())
    with pytest.raises(InvalidArgumentError, match=words) as refusal:
        host.generate(PROMPTS, GREEDY, drafting(policy))
    one_sentence(refusal)
    assert_left_nothing(host)


def test_windows_with_tables_of_their_own(make_llm):
    llm = make_llm("gemma2")
    with pytest.raises(InvalidArgumentError, match="start with disable_hybrid_kv_cache_manager") as refusal:
        llm.generate(PROMPTS, GREEDY, drafting("knorm"))
    one_sentence(refusal)


def test_what_else_a_request_may_ask_for(make_llm):
    llm, config = make_llm(), drafting("knorm")
    engine, compressor = llm.engine, llm.compressor(config)
    long = [*PROMPTS[0], *PROMPTS[3]]
    calls = {
        "a beam search": lambda: llm.beam_search(
            PROMPTS, BeamSearchParams(beam_width=2, max_tokens=8), config
        ),
        "compress_prompt_at": lambda: engine.add_request(
            "r", long, GREEDY, compressor, compress_prompt_at=64
        ),
        "a continuation to be scored": lambda: engine.add_request(
            "r", long, SamplingParams(max_tokens=3), compressor, continuation=[1, 2, 3]
        ),
        "sparse_prefill": lambda: llm.generate(
            with_options([long], sparse_prefill=POOLED), SamplingParams(max_tokens=4), config
        ),
        "a chunk": lambda: llm.generate([[Chunk(PROMPTS[0]), Chunk(PROMPTS[3]), [1, 2]]], GREEDY, config),
    }
    for name, call in calls.items():
        with pytest.raises(InvalidArgumentError, match=f"{name} is given; leave one of them out") as refusal:
            call()
        one_sentence(refusal)
    assert_left_nothing(llm)


def test_without_verify_a_full_cache_on_the_host_is_not_compressed(make_llm):
    host = on_host(make_llm())
    with pytest.raises(InvalidArgumentError, match="set verify=True"):
        host.generate(PROMPTS, GREEDY, small("knorm"))


def one_sentence(refusal) -> None:
    message = str(refusal.value)
    assert message.count(". ") == 0
    assert message.endswith(".")
    assert "verify is True, but " in message
