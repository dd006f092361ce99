"""Restrictions of tokens and text: beside transformers' generate and the tokenizer's own decoding."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import tiny
import torch
from settings import assert_idle, small

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.sampling.sampler import word_ids
from kvreclaim.errors import InvalidArgumentError

GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
PROMPT = [7, 253, 91, 14, 200, 33]


@pytest.fixture
def oracle(tiny_dir) -> Callable[..., list[int]]:
    """Keyword arguments of transformers' generate -> the tokens that it adds to PROMPT."""
    model = tiny.load_oracle(tiny_dir("llama"))

    def generate(**how) -> list[int]:
        given = torch.tensor([PROMPT])
        found = model.generate(
            given,
            attention_mask=torch.ones_like(given),
            do_sample=False,
            min_new_tokens=24,
            max_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
            **how,
        )
        return found[0, len(PROMPT) :].tolist()

    return generate


def tokens_of(llm: LLM, **fields) -> list[int]:
    (out,) = llm.generate(PROMPT, SamplingParams(**GREEDY | fields))
    return out.outputs[0].token_ids


def test_bad_words_are_those_of_transformers(make_llm, oracle) -> None:
    llm = make_llm()
    plain = tokens_of(llm)
    pieces = [llm.tokenizer.decode(plain[at : at + 2]) for at in range(0, 20)]
    words = [text for text in pieces if llm.tokenizer.encode(text, add_special_tokens=False) in pairs(plain)]
    assert words, "no two tokens that came are a text of their own"
    banned = [list(ids) for word in words for ids in word_ids(word, llm.tokenizer)]
    assert not any(PROMPT[-n:] == ids[:n] for ids in banned for n in range(1, len(ids)))
    found = tokens_of(llm, bad_words=words)
    assert found != plain
    assert found == oracle(bad_words_ids=banned)


def pairs(tokens: list[int]) -> list[list[int]]:
    return [list(pair) for pair in pairwise(tokens)]


def test_allowed_tokens_are_those_of_transformers(make_llm, oracle) -> None:
    allowed = list(range(0, 270, 7))
    found = tokens_of(make_llm(), allowed_token_ids=allowed)
    assert set(found) <= set(allowed)
    assert found == oracle(prefix_allowed_tokens_fn=lambda batch, tokens: allowed)


def test_biases_are_those_of_transformers(make_llm, oracle) -> None:
    llm = make_llm()
    bias = dict.fromkeys(tokens_of(llm)[:3], -100.0) | {65: 0.5, 66: 1.5}
    found = tokens_of(llm, logit_bias=bias)
    assert found == oracle(sequence_bias=[[[token], value] for token, value in bias.items()])


@pytest.mark.parametrize("arguments", [{}, {"num_blocks": 9, "max_num_seqs": 8}], ids=str)
@pytest.mark.parametrize("config", [None, small("knorm"), small("knorm", verify=True)], ids=str)
def test_company_preemption_and_drafts_change_nothing(make_llm, config, arguments) -> None:
    """Drawn outputs of several requests at once are those that each of them has alone."""
    fields: list[dict] = [
        {"allowed_token_ids": list(range(5, 250, 5))},
        {"bad_words": ["e", "th", "a"], "n": 2},
        {"logit_bias": {5: 3.0}, "min_tokens": 20, "stop_token_ids": [5]},
        {},
    ]
    params = [
        SamplingParams(seed=at, max_tokens=24, ignore_eos=True, **each) for at, each in enumerate(fields)
    ]
    prompts = tiny.prompts((30, 41, 20, 36))
    llm, roomy = make_llm(**arguments), make_llm()

    def drawn(outputs) -> list[list[list[int]]]:
        return [[each.token_ids for each in out.outputs] for out in outputs]

    alone = [drawn(roomy.generate([p], q, config))[0] for p, q in zip(prompts, params, strict=True)]
    assert drawn(llm.generate(prompts, params, config)) == alone
    compressed = config is not None and not config.verify
    assert not arguments or compressed or llm.stats().totals.num_preemptions
    assert_idle(llm)


def test_no_token_that_may_come_ends_one_request(make_llm) -> None:
    llm = make_llm()
    letter = llm.tokenizer.encode("e", add_special_tokens=False)
    fields = [{"allowed_token_ids": letter, "bad_words": ["ee"]}, {}]
    dead, fine = llm.generate([PROMPT] * 2, [SamplingParams(**GREEDY | each) for each in fields])
    assert (dead.outputs[0].token_ids, dead.outputs[0].finish_reason) == (letter, "error")
    assert "allowed_token_ids" in dead.error
    assert fine.outputs[0].token_ids == tokens_of(llm)
    assert_idle(llm)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"allowed_token_ids": [3, 999]}, "allowed_token_ids"),
        ({"logit_bias": {999: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [999]}, "stop_token_ids"),
        ({"bad_words": ["\ud800"]}, "bad_words"),
    ],
)
def test_what_the_model_does_not_have_is_refused(make_llm, fields, field) -> None:
    llm = make_llm()
    with pytest.raises(InvalidArgumentError) as refused:
        llm.generate(PROMPT, SamplingParams(**fields))
    assert refused.value.field == field
    assert_idle(llm)


def test_special_tokens_in_the_text(make_llm) -> None:
    llm = make_llm()
    end = llm.tokenizer.convert_tokens_to_ids("<eos>")
    fields = {"temperature": 100.0, "allowed_token_ids": [65, end], "seed": 0, "ignore_eos": True}
    for skip in (True, False):
        (out,) = llm.generate(PROMPT, SamplingParams(skip_special_tokens=skip, **fields))
        ids = out.outputs[0].token_ids
        assert set(ids) == {65, end}
        assert out.outputs[0].text == llm.tokenizer.decode(ids, skip_special_tokens=skip)
    assert "<eos>" in out.outputs[0].text


def test_what_ends_an_output_may_stay_in_its_text(make_llm) -> None:
    llm = make_llm()
    letters = llm.tokenizer.encode("op", add_special_tokens=False)
    assert len(letters) == 1
    base = {"temperature": 0.0, "logit_bias": {letters[0]: 100.0}, "max_tokens": 8}
    for stop in ({"stop": ["po"]}, {"stop_token_ids": letters}):
        texts = []
        for include in (False, True):
            seen = list(
                llm.stream(PROMPT, SamplingParams(**base, **stop, include_stop_str_in_output=include))
            )
            assert all(seen[-1].outputs[0].text.startswith(out.outputs[0].text) for out in seen)
            assert seen[-1].outputs[0].finish_reason == "stop"
            texts.append(seen[-1].outputs[0].text)
        assert texts == (["o", "opo"] if "stop" in stop else ["", "op"])


def test_without_text(make_llm) -> None:
    llm = make_llm()
    (out,) = llm.generate("GO wind", SamplingParams(**GREEDY, detokenize=False))
    (with_text,) = llm.generate("GO wind", SamplingParams(**GREEDY))
    assert out.outputs[0].token_ids == with_text.outputs[0].token_ids
    assert (out.outputs[0].text, bool(with_text.outputs[0].text)) == ("", True)


def test_log_probabilities_of_the_whole_vocabulary(make_llm, tiny_dir) -> None:
    llm = make_llm()
    (out,) = llm.generate(
        PROMPT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    )
    model = tiny.load_oracle(tiny_dir("llama"))
    with torch.inference_mode():
        want = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0].double(), -1)
    for report, row in zip([*out.prompt_logprobs[1:], out.outputs[0].logprobs[0]], want, strict=True):
        found = torch.tensor([report[token].logprob for token in range(len(row))], dtype=torch.float64)
        torch.testing.assert_close(found, row, atol=1e-4, rtol=0)
