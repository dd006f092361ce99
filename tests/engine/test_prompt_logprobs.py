"""Log-probabilities of the prompt are the model's, however the prompt is computed."""

from __future__ import annotations

import pytest
import tiny
import torch
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.engine.sampling import logprobs as logprobs_module
from kvreclaim.engine.sampling.logprobs import report, report_prompt
from kvreclaim.errors import InvalidArgumentError


def reporting(num_top=2, **fields):
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 6, "ignore_eos": True, **fields}, prompt_logprobs=num_top
    )


@torch.inference_mode()
def oracle(directory, prompt):
    """[T - 1, V]: row i predicts token i + 1."""
    return tiny.load_oracle(directory)(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def check(found, prompt, want, num_top):
    assert found[0] is None
    assert len(found) == len(prompt)
    for token, line, row in zip(prompt[1:], found[1:], want, strict=True):
        assert set(line) == set(row.topk(num_top).indices.tolist()) | {token}
        for other, entry in line.items():
            assert entry.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[other]).sum())


@pytest.mark.parametrize("chunk", [1, 7, 16, 200])
@pytest.mark.parametrize("num_top", [0, 3])
def test_they_are_those_of_transformers(num_top, chunk, make_llm, calibrated_dir):
    llm = make_llm(max_num_batched_tokens=chunk)
    for prompt in tiny.prompts((1, 2, 16, 45), seed=3):
        plain = llm.generate(prompt, reporting(None))[0]
        assert plain.prompt_logprobs is None
        out = llm.generate(prompt, reporting(num_top))[0]
        check(out.prompt_logprobs, prompt, oracle(calibrated_dir("llama"), prompt), num_top)
        assert out.metrics.num_cached_tokens == 0, "a hit would leave tokens without logits"
        assert out.outputs[0].token_ids == plain.outputs[0].token_ids
    assert_idle(llm)


def test_among_others_and_with_several_outputs(make_llm, calibrated_dir):
    llm = make_llm(max_num_batched_tokens=24)
    prompts = tiny.prompts((40, 33, 21), seed=5)
    params = [reporting(2, n=3, temperature=1.0, seed=1), reporting(None), reporting(1, logprobs=2)]
    outputs = llm.generate(prompts, params)
    for i, num_top in ((0, 2), (2, 1)):
        check(outputs[i].prompt_logprobs, prompts[i], oracle(calibrated_dir("llama"), prompts[i]), num_top)
    assert outputs[1].prompt_logprobs is None


def test_a_prompt_that_is_preempted_half_way(make_llm, calibrated_dir):
    llm = make_llm(block_size=8, num_blocks=11, max_num_batched_tokens=8)
    engine, prompt = llm.engine, tiny.prompts((72,), seed=6)[0]
    decoding = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add_request("decoding", tiny.prompts((6,))[0], decoding)
    engine.step()
    request = engine.add_request("asking", prompt, reporting(2))
    half_way = 0
    while engine.has_unfinished:
        before = len(request.prompt_logprobs)
        engine.step()
        half_way += request.sequences[0].num_computed == 0 and 1 < before < len(prompt)
        assert len(request.prompt_logprobs) >= before
    assert half_way > 0
    check(request.output().prompt_logprobs, prompt, oracle(calibrated_dir("llama"), prompt), 2)
    assert_idle(llm)


@pytest.mark.parametrize("policy", ["knorm", "streaming_llm"])
def test_through_a_compressed_cache_they_are_the_scores(policy, make_llm):
    """Chunks no longer than the interval: a prompt is then compressed where a continuation is."""
    llm = make_llm(max_num_batched_tokens=8)
    config, prompt = small(policy), tiny.prompts((70,), seed=7)[0]
    (score,) = llm.score([prompt[:1]], [prompt[1:]], config)
    (plain,) = llm.score([prompt[:1]], [prompt[1:]])
    (out,) = llm.generate(prompt, reporting(0), config)
    assert out.metrics.compactions > 2
    found = [line[token].logprob for token, line in zip(prompt[1:], out.prompt_logprobs[1:], strict=True)]
    assert found == pytest.approx(score.logprobs, abs=1e-4)
    assert found != pytest.approx(plain.logprobs, abs=1e-2)


def test_a_later_request_hits_what_prompt_logprobs_computed(make_llm):
    llm = make_llm(block_size=8)
    prompt = tiny.prompts((40,))[0]
    llm.generate(prompt, reporting(1))
    assert llm.generate(prompt, reporting(None))[0].metrics.num_cached_tokens == 32


def test_a_prompt_is_reported_a_few_rows_at_a_time(monkeypatch):
    logits = torch.randn(13, 9, generator=torch.Generator().manual_seed(0))
    given = [i % 9 for i in range(13)]
    whole = report(logits.log_softmax(-1), given, 3)
    monkeypatch.setattr(logprobs_module, "MAX_ELEMENTS", 40)
    rows = []
    monkeypatch.setattr(logprobs_module, "report", lambda x, *rest: rows.append(len(x)) or report(x, *rest))
    assert report_prompt(logits, given, 3) == whole
    assert rows == [4, 4, 4, 1]


def test_a_scored_request_has_its_own_way(make_llm):
    llm = make_llm()
    with pytest.raises(InvalidArgumentError, match="prompt_logprobs"):
        llm.engine.add_request("r", [1, 2], reporting(1), continuation=[3])
    with pytest.raises(InvalidArgumentError, match="prompt_logprobs is -2"):
        reporting(-2)
    assert_idle(llm)
