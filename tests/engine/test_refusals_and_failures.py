"""Mistakes are refused whole, a failure stays with its request, nothing leaks."""

from __future__ import annotations

import pytest
import tiny
import torch
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.errors import (
    InvalidArgumentError,
    RequestTooLongError,
    StatsMismatchError,
    UnknownRequestError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize(
    ("arguments", "length", "config", "message"),
    [
        ({"max_model_len": 50}, 50, None, "max_model_len is 50"),
        ({"num_blocks": 4}, 64, None, r"pool holds 64 \(4 blocks of 16\).*compress with a budget"),
        ({"num_blocks": 4, "max_num_batched_tokens": 64}, 100, small("knorm"), "lower the budget"),
    ],
)
def test_a_prompt_that_can_never_run_is_refused(arguments, length, config, message, make_llm):
    llm = make_llm(**arguments)
    with pytest.raises(RequestTooLongError, match=message):
        llm.generate(tiny.prompts((length,)), GREEDY, config)
    assert_idle(llm)


def test_a_mistake_in_one_prompt_names_it_and_leaves_no_trace(make_llm):
    llm = make_llm(max_model_len=50)
    with pytest.raises(RequestTooLongError, match=r"^prompt 1: "):
        llm.generate(tiny.prompts((5, 60, 5)), GREEDY)
    with pytest.raises(InvalidArgumentError, match="token id 999"):
        llm.generate([[1, 999]], GREEDY)
    with pytest.raises(InvalidArgumentError, match="no tokens"):
        llm.generate([[]], GREEDY)
    assert_idle(llm)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -1.0},
        {"top_p": -0.1},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": 2.0},
        {"n": 0},
        {"n": 2, "temperature": 0.0},
        {"max_tokens": 0},
        {"min_tokens": 9, "max_tokens": 3},
        {"stop": ""},
        {"stop": ["a", 3]},
        {"stop": 5},
        {"stop_token_ids": 5},
        {"seed": 2**64},
        {"logprobs": -2},
        {"prompt_logprobs": -2},
        {"stop": "a", "detokenize": False},
        {"skip_special_tokens": 1},
        {"allowed_token_ids": []},
        {"allowed_token_ids": [-1]},
        {"bad_words": "word"},
        {"bad_words": [""]},
        {"presence_penalty": 3.0},
        {"repetition_penalty": 0.0},
        {"temperature": "hot"},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: 100.5}},
        {"logit_bias": {5: float("nan")}},
        {"logit_bias": {5: "much"}},
        {"logit_bias": [5]},
    ],
)
def test_sampling_parameters_are_checked(fields):
    with pytest.raises(InvalidArgumentError) as refused:
        SamplingParams(**fields)
    assert refused.value.field == next(iter(fields))


def test_statistics_that_are_missing_or_foreign(make_llm, tiny_dir, calibrated_dir):
    from kvreclaim import LLM
    from kvreclaim.model_paths import STATS_FILE

    bare = LLM(tiny_dir("llama"), dtype="float32", num_blocks=20)
    with pytest.raises(InvalidArgumentError, match="kvreclaim calibrate"):
        bare.generate([[1, 2, 3]], GREEDY, small("query_mixture"))
    foreign = small("triattention", stats=calibrated_dir("qwen3") / STATS_FILE)
    with pytest.raises(StatsMismatchError, match="do not fit the model"):
        bare.generate([[1, 2, 3]], GREEDY, foreign)
    assert_idle(bare)


def test_a_request_whose_numbers_break_does_not_infect_others(make_llm):
    """One token's embedding is NaN; each request with it fails, and the blocks it leaves are clean again."""
    llm = make_llm(num_blocks=12, enable_prefix_caching=False)
    good = tiny.prompts((20, 25))
    expected = llm.generate(good, GREEDY)
    llm.loaded.model.get_input_embeddings().weight[0] = float("nan")
    outputs = llm.generate([good[0], [0] * 60, good[1]], GREEDY)
    assert outputs[1].outputs[0].finish_reason == "error"
    assert "NaN" in outputs[1].error
    assert [outputs[i].outputs[0].token_ids for i in (0, 2)] == [out.outputs[0].token_ids for out in expected]
    again = llm.generate(good, GREEDY)
    assert [out.outputs[0].token_ids for out in again] == [out.outputs[0].token_ids for out in expected]
    assert_idle(llm)


def test_a_stop_token_outside_of_the_vocabulary_is_refused(make_llm):
    params = SamplingParams(temperature=0.0, min_tokens=2, max_tokens=4, stop_token_ids=[99999])
    with pytest.raises(InvalidArgumentError, match="99999"):
        make_llm().generate([[1, 2]], params)


def test_unseeded_outputs_differ_and_do_not_depend_on_company(make_llm):
    prompt = tiny.prompts((9,))[0]
    params = SamplingParams(n=2, temperature=1.0, max_tokens=12, ignore_eos=True)
    alone = [o.token_ids for o in make_llm().generate([prompt], params)[0].outputs]
    outputs = make_llm().generate([prompt] * 3, params)
    drawn = [o.token_ids for out in outputs for o in out.outputs]
    assert len({tuple(tokens) for tokens in drawn}) == 6
    assert drawn[:2] == alone


def test_streams_that_take_turns_lose_nothing(make_llm):
    llm = make_llm()
    expected = [out.outputs[0].token_ids for out in llm.generate(tiny.prompts((5, 8)), GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in tiny.prompts((5, 8))]
    last = [None, None]
    while any(out is None or not out.finished for out in last):
        for i, stream in enumerate(streams):
            last[i] = next(stream, last[i])
    assert [out.outputs[0].token_ids for out in last] == expected
    assert [list(stream) for stream in streams] == [[], []]
    assert_idle(llm)


def test_a_stream_reports_a_failure_between_prompt_chunks(make_llm, monkeypatch):
    llm = make_llm(max_num_batched_tokens=16)
    config = small("knorm")
    monkeypatch.setattr(llm.compressor(config), "choose_all", lambda *args, **kwargs: 1 / 0)
    (out,) = llm.stream(tiny.prompts((100,))[0], GREEDY, config)
    assert out.finished
    assert out.error == "ZeroDivisionError: division by zero"


def test_a_short_prompt_decodes_past_the_pool_if_its_budget_fits(make_llm):
    llm = make_llm(num_blocks=8)
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)
    (out,) = llm.generate(tiny.prompts((20,)), params, small("knorm", budget=40))
    assert len(out.outputs[0].token_ids) == 400
    assert out.metrics.peak_blocks <= 4


def test_evicting_before_the_first_block_is_full(make_llm):
    llm = make_llm(block_size=64, num_blocks=20)
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    (out,) = llm.generate(tiny.prompts((20,)), params, small("knorm", budget=32, interval=16))
    assert out.error is None
    assert out.metrics.compactions > 0


def test_aborting_returns_all_blocks(make_llm):
    llm = make_llm(block_size=8, num_blocks=30)
    engine = llm.engine
    sampled = SamplingParams(n=3, temperature=1.0, max_tokens=50, ignore_eos=True)
    for i, prompt in enumerate(tiny.prompts((40, 30, 20, 200))):
        engine.add_request(f"r{i}", prompt, sampled if i == 1 else GREEDY)
    for _ in range(6):
        engine.step()
    with pytest.raises(InvalidArgumentError, match="'r1' is in use"):
        engine.add_request("r1", [1], GREEDY)
    for i in range(4):
        if f"r{i}" in engine.requests:
            llm.abort(f"r{i}")
    assert_idle(llm)
    with pytest.raises(UnknownRequestError, match="'r1' is unknown"):
        llm.abort("r1")


@pytest.mark.parametrize("prompts", [5, None, [None], [1, "a"], b"abc", {"text": "x"}, torch.tensor([1, 2])])
def test_prompts_of_a_wrong_type_are_refused(prompts, make_llm):
    with pytest.raises(InvalidArgumentError, match=r"pass (text|one of)|ids are integers"):
        make_llm().generate(prompts, GREEDY)


@pytest.mark.parametrize("params", [{"n": 1}, "greedy", 5, {}])
def test_parameters_of_a_wrong_type_are_refused(params, make_llm):
    with pytest.raises(InvalidArgumentError, match=r"pass SamplingParams"):
        make_llm().generate([[1, 2]], params)


@pytest.mark.parametrize("compression", ["knorm", 5, {"policy": "knorm"}])
def test_compression_of_a_wrong_type_is_refused(compression, make_llm):
    with pytest.raises(InvalidArgumentError, match=r"pass CompressionConfig"):
        make_llm().generate([[1, 2]], GREEDY, compression)
    with pytest.raises(InvalidArgumentError, match=r"pass CompressionConfig"):
        make_llm(compression=compression)


def test_a_pool_beyond_the_memory_is_refused(make_llm):
    with pytest.raises(InvalidArgumentError, match="MiB are free"):
        make_llm(num_blocks=10**12)
