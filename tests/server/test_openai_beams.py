"""Beam search over HTTP: the outputs of LLM.beam_search, with both scores."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from running import MODEL

from kvreclaim import LLM, BeamSearchParams

PROMPT = "the end of the story"


def search(client: openai.OpenAI, **fields: Any):
    """A completion by beam search; what is no field of the client's goes as an extra one."""
    known = {name: fields.pop(name) for name in ("n", "max_tokens", "prompt") if name in fields}
    extra = {"use_beam_search": True, **fields}
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, **known}, extra_body=extra)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"n": 3}, {"beam_width": 3, "num_return_sequences": 3}),
        ({"beam_width": 4}, {"beam_width": 4, "num_return_sequences": 1}),
        (
            {"n": 2, "beam_width": 4, "length_penalty": 0.0, "early_stopping": "never", "ignore_eos": True},
            {
                "beam_width": 4,
                "num_return_sequences": 2,
                "length_penalty": 0.0,
                "early_stopping": "never",
                "ignore_eos": True,
            },
        ),
    ],
)
def test_the_choices_are_the_engines(client: openai.OpenAI, tiny_oracle: LLM, fields, params):
    (want,) = tiny_oracle.beam_search(PROMPT, BeamSearchParams(max_tokens=12, **params))
    answer = search(client, max_tokens=12, **fields)
    assert [choice.text for choice in answer.choices] == [each.text for each in want.outputs]
    assert [choice.finish_reason for choice in answer.choices] == [
        each.finish_reason for each in want.outputs
    ]
    for choice, each in zip(answer.choices, want.outputs, strict=True):
        assert choice.cumulative_logprob == pytest.approx(each.cumulative_logprob, abs=1e-4)
        assert choice.sequences_scores == pytest.approx(each.sequences_scores, abs=1e-4)
    assert answer.usage.completion_tokens == sum(len(each.token_ids) for each in want.outputs)


def test_several_prompts_and_a_conversation(client: openai.OpenAI):
    answer = search(client, prompt=[PROMPT, "GO"], n=2, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    said = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "GO"}],
        n=2,
        max_tokens=5,
        extra_body={"use_beam_search": True},
    )
    assert len(said.choices) == 2
    first, second = (choice.sequences_scores for choice in said.choices)
    assert first >= second


def test_temperature_0_is_what_clients_of_vllm_say(client: openai.OpenAI):
    assert search(client, temperature=0, max_tokens=3).choices[0].sequences_scores < 0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": 0.7}, "temperature"),
        ({"top_k": 3}, "top_k"),
        ({"seed": 1}, "seed"),
        ({"stop": "x"}, "stop"),
        ({"logprobs": 0}, "logprobs"),
        ({"repetition_penalty": 1.2}, "repetition_penalty"),
        ({"bad_words": ["a"]}, "bad_words"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"beam_width": 2, "n": 3}, "n"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"length_penalty": 99.0}, "length_penalty"),
        ({"beam_width": 65}, "beam_width"),
        ({"use_beam_search": False, "beam_width": 2}, "beam_width"),
        ({"use_beam_search": False, "length_penalty": 1.0}, "length_penalty"),
        ({"beam_width": 64, "max_tokens": 400}, "beam_width"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(client: openai.OpenAI, fields, name):
    with pytest.raises(openai.BadRequestError) as refused:
        search(client, **fields)
    assert name in str(refused.value.param)


def test_a_stream_is_refused(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="stream does not go with use_beam_search"):
        client.completions.create(
            model=MODEL, prompt=PROMPT, stream=True, extra_body={"use_beam_search": True}
        )
