"""LLM's face: parameters have the effect they promise, mistakes are refused whole, nothing leaks."""

from __future__ import annotations

import pytest
import tiny
import torch
from settings import assert_idle, small, with_options

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.engine.request.outputs import RequestOutput
from kvreclaim.errors import (
    InvalidArgumentError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def test_text_in_text_out(make_llm):
    llm = make_llm()
    (out,) = llm.generate("then the end", GREEDY)
    assert out.prompt == "then the end"
    assert out.prompt_token_ids == llm.tokenizer.encode("then the end")
    assert out.outputs[0].text == llm.tokenizer.decode(out.outputs[0].token_ids, skip_special_tokens=True)
    assert out.finished
    assert out.metrics.num_generated_tokens == 12
    assert 0 < out.metrics.ttft_s <= out.metrics.e2e_s


def test_one_setting_or_one_per_prompt(make_llm):
    llm = make_llm()
    prompts = tiny.prompts((9, 30, 4))
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (3, 40, 1)]
    outputs = llm.generate(prompts, params, [None, small("knorm"), None])
    assert [len(out.outputs[0].token_ids) for out in outputs] == [3, 40, 1]
    assert [out.metrics.compactions > 0 for out in outputs] == [False, True, False]
    assert [out.prompt_token_ids for out in outputs] == prompts
    with pytest.raises(InvalidArgumentError, match="2 entries for 3 prompts"):
        llm.generate(prompts, params[:2])
    assert_idle(llm)


def test_the_engines_own_compression_is_the_default_and_can_be_overridden(make_llm):
    llm = make_llm(compression=small("knorm"))
    prompt = tiny.prompts((40,))
    (compressed,) = llm.generate(prompt, GREEDY)
    (whole,) = llm.generate(prompt, GREEDY, CompressionConfig("full"))
    assert compressed.metrics.tokens_evicted > 0
    assert whole.metrics.tokens_evicted == 0


def test_stop_strings_and_tokens(make_llm):
    llm = make_llm()
    (plain,) = llm.generate("stop the end", SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    text, ids = plain.outputs[0].text, plain.outputs[0].token_ids
    stop = text[8:11]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=[stop, "never"])
    (cut,) = llm.generate("stop the end", params)
    assert cut.outputs[0].text == text[: text.index(stop)]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)
    token = ids[9]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop_token_ids=[token])
    (ended,) = llm.generate("stop the end", params)
    assert ended.outputs[0].token_ids == ids[: ids.index(token) + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", token)


def test_end_of_sequence_and_min_tokens(tmp_path):
    from kvreclaim import LLM

    (answer,) = tiny.greedy(tiny.save_model("llama", tmp_path / "plain"), tiny.prompts((6,)), 20)
    eos = answer[5]
    first = answer.index(eos)
    llm = LLM(tiny.save_model("llama", tmp_path / "eos", eos_token_id=eos), dtype="float32", num_blocks=50)
    prompt = tiny.prompts((6,))
    (out,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=20))
    assert out.outputs[0].token_ids == answer[: first + 1]
    assert out.outputs[0].finish_reason == "stop"
    (ignoring,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    assert ignoring.outputs[0].token_ids == answer
    (late,) = llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=20, min_tokens=first + 4))
    assert eos not in late.outputs[0].token_ids[: first + 4]


def test_n_outputs_share_the_prompt(make_llm):
    llm = make_llm(block_size=8)
    prompt = tiny.prompts((43,))[0]
    params = SamplingParams(n=4, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True)
    (out,) = llm.generate(prompt, params)
    assert [o.index for o in out.outputs] == [0, 1, 2, 3]
    assert len({tuple(o.token_ids) for o in out.outputs}) == 4
    stats = llm.engine.memory.stats()
    assert stats.cow_copies == 3
    assert stats.peak_in_use < 4 * 7
    (again,) = llm.generate(prompt, params)
    assert [o.token_ids for o in again.outputs] == [o.token_ids for o in out.outputs]
    assert_idle(llm)


def test_scores_are_those_of_the_model(make_llm, calibrated_dir):
    llm = make_llm(max_num_batched_tokens=16)
    prompts, continuations = tiny.prompts((10, 30)), tiny.prompts((25, 7), seed=8)
    oracle = tiny.load_oracle(calibrated_dir("llama"))
    for _ in range(2):  # the second time with prefix hits
        scored = llm.score(prompts, continuations)
        for prompt, continuation, result in zip(prompts, continuations, scored, strict=True):
            with torch.inference_mode():
                logits = oracle(torch.tensor([prompt + continuation])).logits[0, len(prompt) - 1 : -1]
            given = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])[:, 0]
            assert result.predicted == logits.argmax(-1).tolist()
            torch.testing.assert_close(torch.tensor(result.logprobs), given, atol=1e-4, rtol=0)
    assert scored[1].metrics.num_cached_tokens > 0
    assert_idle(llm)
    with pytest.raises(InvalidArgumentError, match="continuation is empty"):
        llm.score([[1, 2]], [[]])
    with pytest.raises(InvalidArgumentError, match="prompt has no tokens"):
        llm.score([[]], [[1, 2]])


def test_streaming_gives_growing_outputs_and_closing_aborts(make_llm):
    llm = make_llm()
    seen = [len(out.outputs[0].token_ids) for out in llm.stream("the end", GREEDY)]
    assert seen == list(range(1, 13))
    stream = llm.stream("the end", GREEDY)
    assert isinstance(next(stream), RequestOutput)
    assert llm.engine.memory.stats().in_use > 0
    stream.close()
    assert_idle(llm)


class Counted(list):
    """A list that counts the items that are copied out of it."""

    copied = 0

    def __getitem__(self, place):
        found = super().__getitem__(place)
        self.copied += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self):
        self.copied += len(self)
        return super().__iter__()


def test_a_stream_copies_nothing_that_it_has_sent(make_llm):
    """It copies what is new at each token, and all of the outputs that are read."""
    llm, num_tokens = make_llm(enable_prefix_caching=False), 200  # whose keys would hold the same lists
    params = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    stream = llm.stream("the end", params)
    outputs = [next(stream)]
    [request] = llm.engine.requests.values()
    [seq] = request.sequences
    tokens, reports, known = map(Counted, (seq.token_ids, seq.logprobs, request.prompt_logprobs))
    seq.token_ids, seq.logprobs, request.prompt_logprobs = tokens, reports, known
    outputs += stream
    assert len(outputs) == num_tokens
    assert tokens.copied < 4 * num_tokens
    assert reports.copied == known.copied == 0
    [whole] = llm.generate("the end", params)
    for count, output in enumerate(outputs, 1):
        assert output.outputs[0].token_ids == whole.outputs[0].token_ids[:count]
        assert output.outputs[0].logprobs == whole.outputs[0].logprobs[:count]
        assert output.prompt_logprobs == whole.prompt_logprobs
        assert output.finished == (count == num_tokens)
    assert outputs[-1].outputs == whole.outputs
    outputs[-1].outputs[0].token_ids.clear()
    assert len(outputs[-2].outputs[0].token_ids) == num_tokens - 1, "each has lists of its own"


def test_chat_uses_the_template(make_llm):
    llm = make_llm()
    (out,) = llm.chat([{"role": "user", "content": "end"}], GREEDY)
    assert llm.tokenizer.decode(out.prompt_token_ids) == "user: end\nassistant: "


def test_priority_of_limits(make_llm):
    llm = make_llm(max_model_len=50)
    (out,) = llm.generate(
        tiny.prompts((40,)), SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    )
    assert len(out.outputs[0].token_ids) == 10
    assert out.outputs[0].finish_reason == "length"


def test_salts_isolate_prefixes(make_llm):
    llm = make_llm(block_size=8)
    prompt = tiny.prompts((40,))
    params = SamplingParams(temperature=0.0, max_tokens=1)

    def cached(salt):
        return llm.generate(with_options(prompt, cache_salt=salt), params)[0].metrics.num_cached_tokens

    assert [cached("a"), cached("b"), cached(None), cached("a"), cached("b")] == [0, 0, 0, 32, 32]
