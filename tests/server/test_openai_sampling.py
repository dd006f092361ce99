"""Every field of sampling: the answer is the engine's with the same parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from running import MODEL
from talking import EOS, GREEDY, PROMPT, Talker, talker

from kvreclaim import LLM, BeamSearchParams, SamplingParams

SEEDED = {"seed": 11, "max_tokens": 12}
LONG = GREEDY | {"max_tokens": 60}
"""So many that a random model says some token twice, which is what penalties are for."""

SAMPLING: dict[str, tuple[dict[str, Any], Any, Any]] = {
    # field: (the other fields, the value that is set, the engine's value where it has another form)
    "max_tokens": ({"temperature": 0.0, "max_tokens": 12}, 5, 5),
    "temperature": (SEEDED, 0.0, 0.0),
    "top_p": (SEEDED, 0.05, 0.05),
    "top_k": (SEEDED, 1, 1),
    "min_p": (SEEDED, 1.0, 1.0),
    "seed": (SEEDED, 12, 12),
    "repetition_penalty": (LONG, 50.0, 50.0),
    "presence_penalty": (LONG, 2.0, 2.0),
    "frequency_penalty": (LONG, 2.0, 2.0),
    "logit_bias": (GREEDY, {"65": 100}, {65: 100}),
    "stop": (GREEDY | {"logit_bias": {"65": 100}}, ["bb"], ["bb"]),
    "stop_token_ids": (GREEDY | {"logit_bias": {"65": 100}}, [65], [65]),
    "ignore_eos": (GREEDY | {"logit_bias": {str(EOS): 100}}, True, True),
    "min_tokens": (GREEDY | {"logit_bias": {str(EOS): 100}}, 3, 3),
    "n": (SEEDED, 3, 3),
    "allowed_token_ids": (GREEDY, [65, 66, 67], [65, 66, 67]),
    "bad_words": (GREEDY | {"logit_bias": {"65": 100}}, ["b", "bb"], ["b", "bb"]),
    "skip_special_tokens": (GREEDY | {"logit_bias": {str(EOS): 100}, "ignore_eos": True}, False, False),
    "include_stop_str_in_output": (GREEDY | {"logit_bias": {"65": 100}, "stop": ["bb"]}, True, True),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Talker]:
    with talker(tmp_path_factory.mktemp("talker")) as server:
        yield server


@pytest.mark.parametrize("field", SAMPLING)
def test_how_tokens_are_drawn(server: Talker, field: str):
    """With the field the answer is another one, and the one that the engine gives."""
    base, value, engine_value = SAMPLING[field]

    def expected(**fields: Any) -> list[tuple[str, str]]:
        bias = {int(token): bias for token, bias in fields.pop("logit_bias", {}).items()}
        params = SamplingParams(**fields, logit_bias=bias or None)
        outputs = server.oracle.generate(PROMPT, params)[0].outputs
        return [(output.text, output.finish_reason) for output in outputs]

    def answered(**fields: Any) -> list[tuple[str, str]]:
        return [(c["text"], c["finish_reason"]) for c in server.completion(**fields)["choices"]]

    without, given = answered(**base), answered(**{**base, field: value})
    assert given != without
    assert without == expected(**base)
    assert given == expected(**{**base, field: engine_value})


def test_seeds_are_signed_or_any(server: Talker):
    """-1 is as good as none; every other 64-bit integer is a seed of its own."""
    assert SamplingParams(seed=-1) == SamplingParams()
    params = {"max_tokens": 12, "temperature": 1.5}
    for seed in (-5, -(2**63), 2**64 - 1):
        [output] = server.oracle.generate(PROMPT, SamplingParams(**params, seed=seed))[0].outputs
        for _ in range(2):
            assert server.completion(**params, seed=seed)["choices"][0]["text"] == output.text
    texts = {server.completion(**params, seed=seed)["choices"][0]["text"] for seed in (-1, -1, -5, 5)}
    assert len(texts) == 4


STORY = "the end of the story"


def search(client: openai.OpenAI, **fields: Any):
    """A completion by beam search; fields that the client lacks go in extra_body."""
    known = {name: fields.pop(name) for name in ("n", "max_tokens", "prompt") if name in fields}
    extra = {"use_beam_search": True, **fields}
    return client.completions.create(**{"model": MODEL, "prompt": STORY, **known}, extra_body=extra)


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
    (want,) = tiny_oracle.beam_search(STORY, BeamSearchParams(max_tokens=12, **params))
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
    answer = search(client, prompt=[STORY, "GO"], n=2, max_tokens=5)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    chat = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "GO"}],
        n=2,
        max_tokens=5,
        extra_body={"use_beam_search": True},
    )
    assert len(chat.choices) == 2
    first, second = (choice.sequences_scores for choice in chat.choices)
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
            model=MODEL, prompt=STORY, stream=True, extra_body={"use_beam_search": True}
        )
