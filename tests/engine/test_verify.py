"""A compressed cache drafts, the full one verifies: answers are those of an engine without compression."""

from __future__ import annotations

import pytest
from settings import assert_idle, small
from verifying import GREEDY, POLICIES, PROMPTS, SAMPLED, drafting, on_host, results

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.engine.features.verification.feature import Verification
from kvreclaim.eval.demo_tasks import DEMO_TASKS

FORMATS = ("fp32", "bf16", "int8", "int4", "fp8_e4m3", "turboquant4", "int8+int4")
ON_HOST = [p for p in POLICIES if p not in ("quest", "kvzap")]
SAMPLING = {
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    "logit bias": {"logit_bias": {3: 4.0, 17: -100.0, 200: 3.5}},
    "stop tokens": {"stop_token_ids": [3, 17, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49]},
    "least tokens": {"min_tokens": 12, "ignore_eos": False},
    "three": {"n": 3, "temperature": 1.2, "seed": 5},
    "top": {"top_k": 20, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, "seed": 7},
    "unseeded": {"temperature": 1.0},
    "one token": {"max_tokens": 1},
    "prompt logprobs": {"prompt_logprobs": 1},
}


def assert_drafted(llm: LLM) -> None:
    """Drafts were made, some were accepted, none failed, and nothing is left of them."""
    speculation = llm.engine.totals.speculation
    assert speculation.num_failed == 0
    assert speculation.num_draft_tokens >= speculation.num_accepted_tokens > 0
    assert_left_nothing(llm)


def assert_left_nothing(llm: LLM) -> None:
    assert_idle(llm)
    verifier = llm.engine.feature(Verification).verifier
    memory = verifier.companions.memory
    memory.check()
    assert memory.stats().in_use == len(verifier.companions) == 0
    assert verifier._readers == verifier._drafts == verifier.tracker._unborn == {}


@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policys_answers_are_the_full_caches(policy, params, make_llm):
    llm = make_llm()
    expected = results(llm.generate(PROMPTS, params))
    verified = llm.sibling()
    assert results(verified.generate(PROMPTS, params, drafting(policy))) == expected
    assert_drafted(verified)


@pytest.mark.parametrize("policy", ON_HOST)
def test_so_they_are_from_host_memory(policy, make_llm):
    llm = make_llm()
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED]
    expected = results(llm.generate(PROMPTS, params))
    host = on_host(llm)
    assert results(host.generate(PROMPTS, params, drafting(policy))) == expected
    assert_drafted(host)


@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_whatever_a_request_asks_for(sampling, make_llm):
    fields = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logprobs": 2, **sampling}
    llm = make_llm()
    params = SamplingParams(**fields)
    expected = results(llm.generate(PROMPTS, params))
    for verified in (llm.sibling(), on_host(llm)):
        assert results(verified.generate(PROMPTS, params, drafting("snapkv"))) == expected
        assert verified.engine.totals.speculation.num_failed == 0
        assert_left_nothing(verified)


@pytest.mark.parametrize(
    ("policy", "host"),
    [(policy, host) for policy in ("snapkv", "query_mixture", "h2o") for host in (False, True)]
    + [("quest", False)],
)
def test_of_prompts_that_are_found_as_much_is_found_as_without_drafts(policy, host, make_llm):
    """Tokens computed anew, in other pieces, may be rounded otherwise; attention that is added up needs all,
    and from the host whatever needs queries."""
    llm = make_llm(dtype="bfloat16")
    llm = on_host(llm) if host else llm
    llm.generate(PROMPTS, GREEDY)
    expected = llm.generate(PROMPTS, GREEDY)
    speculation = llm.engine.totals.speculation
    found = llm.generate(PROMPTS, GREEDY, drafting(policy))
    assert speculation.num_draft_tokens > 0
    assert speculation.num_failed == 0
    assert_left_nothing(llm)
    if policy == "h2o" or (host and policy == "snapkv"):
        assert {out.metrics.num_cached_tokens for out in found} == {0}
    else:
        assert results(found) == results(expected)
        assert [out.metrics.num_cached_tokens for out in found] == [
            out.metrics.num_cached_tokens for out in expected
        ]


def test_strings_that_end_an_answer_within_a_draft():
    llm = LLM(demo_model(), num_blocks=200, device="cpu")
    plain = llm.generate([recall_prompt(0)], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))[
        0
    ].outputs[0]
    words = plain.text.split()
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=1, stop=words[5:8])
    expected = llm.generate([recall_prompt(0)], params)
    assert expected[0].outputs[0].finish_reason == "stop"
    verified = llm.sibling()
    assert results(verified.generate([recall_prompt(0)], params, drafting())) == results(expected)
    assert verified.engine.totals.speculation.num_failed == 0
    assert_left_nothing(verified)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMATS)
def test_every_format(form, dtype, make_llm):
    llm = make_llm(kv_cache_dtype=form, dtype=dtype)
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED]
    expected = results(llm.generate(PROMPTS, params))
    for verified in (llm.sibling(), on_host(llm)):
        assert results(verified.generate(PROMPTS, params, drafting("query_mixture"))) == expected
        assert_drafted(verified)


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "deepseek-v3", "gemma2", "mistral"])
def test_other_families(family, make_llm):
    """Products of experts are not the native kernels': there probabilities are compared less closely."""
    llm = make_llm(family, disable_hybrid_kv_cache_manager=True)
    params = [GREEDY, SAMPLED, GREEDY, SAMPLED]
    expected = results(llm.generate(PROMPTS, params))
    verified = llm.sibling()
    found = results(verified.generate(PROMPTS, params, drafting("knorm")))
    if family in ("qwen3-moe", "deepseek-v3"):
        assert [[each[:3] for each in outputs] for outputs in found] == [
            [each[:3] for each in outputs] for outputs in expected
        ]
    else:
        assert found == expected
    assert verified.engine.totals.speculation.num_draft_tokens > 0
    assert verified.engine.totals.speculation.num_failed == 0


@pytest.mark.parametrize("drafts", [1, 3, 16, 64])
def test_however_many_are_drafted(drafts, make_llm):
    llm = make_llm()
    expected = results(llm.generate(PROMPTS, SAMPLED))
    verified = llm.sibling()
    assert results(verified.generate(PROMPTS, SAMPLED, drafting("snapkv", verify_tokens=drafts))) == expected
    assert_drafted(verified)


@pytest.mark.parametrize("policy", ["h2o", "snapkv", "query_mixture", "quest"])
def test_prompts_in_chunks_beside_plain_and_compressed_requests(policy, make_llm):
    llm = make_llm(max_num_batched_tokens=24)
    compressed = small("knorm")
    expected = results(llm.generate(PROMPTS, GREEDY, [None, None, compressed, None]))
    verified = llm.sibling()
    configs = [drafting(policy), None, compressed, drafting(policy)]
    assert results(verified.generate(PROMPTS, GREEDY, configs)) == expected
    assert verified.engine.totals.speculation.num_accepted_tokens > 0
    assert verified.engine.totals.speculation.num_failed == 0
    assert_left_nothing(verified)


def recall_prompt(place: int) -> list[int]:
    """A document of the demo model's, and a question about it."""
    return list(DEMO_TASKS["recall"].make(512).sample(place).prompt)


@pytest.mark.parametrize("host", [False, True], ids=["pool", "host"])
def test_most_drafts_are_accepted_where_the_policy_suits_the_text(host):
    """The reference has 7.6 tokens per verification, averaged over four tasks, of 9 at most."""
    llm = LLM(demo_model(), num_blocks=400, device="cpu")
    prompts = [recall_prompt(i) for i in range(4)]
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    expected = results(llm.generate(prompts, params))
    verified = on_host(llm, 400) if host else llm.sibling()
    config = drafting(budget=96, recent=16, sinks=4, interval=32)
    assert results(verified.generate(prompts, params, config)) == expected
    assert_drafted(verified)
    speculation = verified.engine.totals.speculation
    assert speculation.num_accepted_tokens / speculation.num_drafts + 1 >= 0.9 * 7.6
