"""Log-probabilities, echoed prompts, token ids: every token's figures stand with that token."""

from __future__ import annotations

import math
from collections.abc import Iterator

import openai
import pytest
from running import MODEL, Running, openai_client

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.sampling.logprobs import Logprob
from kvreclaim.server.base.vocabulary import TokenPlaces, Vocabulary
from kvreclaim.server.openai.logprobs import LOWEST, completion_logprobs

PROMPT = "the end of the story"
GREEDY = {"model": MODEL, "temperature": 0.0, "max_tokens": 24}


@pytest.fixture
def words(server: Running) -> Iterator[openai.OpenAI]:
    """A client of the demo model; its tokens are words."""
    with openai_client(server) as client:
        yield client


def expected(oracle: LLM, logprobs: int):
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=logprobs)
    return oracle.generate(PROMPT, params)[0].outputs[0]


def test_of_a_completion(client: openai.OpenAI, tiny_oracle: LLM):
    output = expected(tiny_oracle, 3)
    found = client.completions.create(prompt=PROMPT, **GREEDY, logprobs=3).choices[0].logprobs
    assert found.tokens == [tiny_oracle.tokenizer.decode([token]) for token in output.token_ids]
    pairs = list(zip(output.token_ids, output.logprobs, strict=True))
    assert found.token_logprobs == pytest.approx([report[token].logprob for token, report in pairs], abs=1e-5)
    for (_, report), top in zip(pairs, found.top_logprobs, strict=True):
        assert max(top.values()) == pytest.approx(max(p.logprob for p in report.values()), abs=1e-5)
        assert len(top) == len(report)


@pytest.mark.parametrize("stop", [None, "@@@"])
def test_streamed_figures_are_those_of_the_whole_answer(client: openai.OpenAI, stop: str | None):
    """Also where text is held back: a character in parts, what may begin a stop string."""
    request = {**GREEDY, "prompt": PROMPT, "logprobs": 2, "stop": stop}
    whole = client.completions.create(**request).choices[0].logprobs.model_dump()
    parts: dict[str, list] = {name: [] for name in whole}
    for chunk in client.completions.create(**request, stream=True):
        for name, values in chunk.choices[0].logprobs.model_dump().items():
            parts[name] += values
    assert parts == whole
    assert len(parts["tokens"]) == 24


def test_of_a_chat(client: openai.OpenAI, tiny_oracle: LLM):
    messages = [{"role": "user", "content": PROMPT}]
    params = SamplingParams(temperature=0.0, max_tokens=24, logprobs=2)
    output = tiny_oracle.chat(messages, params)[0].outputs[0]
    request = {**GREEDY, "messages": messages, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**request).choices[0]
    assert len(choice.logprobs.content) == 24
    for token_id, report, found in zip(
        output.token_ids, output.logprobs, choice.logprobs.content, strict=True
    ):
        assert found.token == tiny_oracle.tokenizer.decode([token_id])
        assert found.logprob == pytest.approx(report[token_id].logprob, abs=1e-5)
        best = sorted((p.logprob for p in report.values() if p.rank <= 2), reverse=True)
        assert [top.logprob for top in found.top_logprobs] == pytest.approx(best, abs=1e-5)
    spelt = bytes(byte for found in choice.logprobs.content for byte in found.bytes)
    assert spelt.decode(errors="replace") == choice.message.content


def test_scoring_a_text_by_echo(client: openai.OpenAI, tiny_oracle: LLM):
    """max_tokens 0 with echo: how lm-evaluation-harness reads log-likelihoods."""
    ids = tiny_oracle.tokenizer.encode(PROMPT)
    score = tiny_oracle.score([ids[:1]], [ids[1:]])[0]
    answer = client.completions.create(prompt=PROMPT, **GREEDY | {"max_tokens": 0}, echo=True, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == PROMPT
    assert choice.finish_reason == "length"
    assert answer.usage.completion_tokens == 0
    found = choice.logprobs
    assert found.tokens == [tiny_oracle.tokenizer.decode([token]) for token in ids]
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.token_logprobs[1:] == pytest.approx(score.logprobs, abs=1e-4)
    likely = [max(top, key=top.get) for top in found.top_logprobs[1:]]
    assert likely == [tiny_oracle.tokenizer.decode([token]) for token in score.predicted]
    assert "".join(found.tokens) == PROMPT
    assert all(PROMPT[o:].startswith(t) for t, o in zip(found.tokens, found.text_offset, strict=True))


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_goes_on_as_the_model_does(words: openai.OpenAI, stream: bool):
    """The answer's first word is joined to the prompt as the tokenizer joins words."""
    prompt = "GO L8 wave"
    alone = words.completions.create(prompt=prompt, **GREEDY).choices[0].text
    request = {**GREEDY, "prompt": prompt, "echo": True, "logprobs": 0}
    answer = words.completions.create(**request, stream=stream)
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text for chunk in chunks) == f"{prompt} {alone}"
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert "".join(tokens) == f"{prompt} {alone}"
    assert [token.strip() for token in tokens] == prompt.split() + alone.split()
    offsets = [offset for chunk in chunks for offset in chunk.choices[0].logprobs.text_offset]
    text = f"{prompt} {alone}"
    assert all(text[o:].startswith(t) for t, o in zip(tokens, offsets, strict=True))


def test_prompt_logprobs(client: openai.OpenAI, tiny_oracle: LLM):
    ids = tiny_oracle.tokenizer.encode(PROMPT)
    score = tiny_oracle.score([ids[:1]], [ids[1:]])[0]
    extra = {"prompt_logprobs": 1}
    found = client.completions.create(prompt=PROMPT, **GREEDY, extra_body=extra).choices[0].prompt_logprobs
    assert found[0] is None
    given = [entry[str(token)] for entry, token in zip(found[1:], ids[1:], strict=True)]
    assert [entry["logprob"] for entry in given] == pytest.approx(score.logprobs, abs=1e-4)
    assert [entry["decoded_token"] for entry in given] == [tiny_oracle.tokenizer.decode([t]) for t in ids[1:]]
    best = [next(token for token, entry in each.items() if entry["rank"] == 1) for each in found[1:]]
    assert best == [str(token) for token in score.predicted]
    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(messages=messages, **GREEDY, extra_body=extra)
    assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids(client: openai.OpenAI, tiny_oracle: LLM, stream: bool):
    output = expected(tiny_oracle, 0)
    extra = {"return_token_ids": True}
    answer = client.completions.create(prompt=PROMPT, **GREEDY, extra_body=extra, stream=stream)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    assert [token for choice in choices for token in choice.token_ids] == output.token_ids
    assert choices[0].prompt_token_ids == tiny_oracle.tokenizer.encode(PROMPT)
    assert not any(hasattr(choice, "prompt_token_ids") for choice in choices[1:])
    messages = [{"role": "user", "content": PROMPT}]
    chat = client.chat.completions.create(messages=messages, **GREEDY, extra_body=extra, stream=stream)
    parts = list(chat) if stream else [chat]
    assert len(parts[0].prompt_token_ids) > len(choices[0].prompt_token_ids)
    ids = [token for part in parts for token in getattr(part.choices[0], "token_ids", None) or []]
    assert len(ids) == 24


def test_what_json_cannot_say(tiny_oracle: LLM):
    """A log-probability of minus infinity, and two keys that are alike: the drawn token keeps its text."""
    a, b = tiny_oracle.tokenizer.encode("漢")[:2]
    report = {a: Logprob(-0.5, 1), b: Logprob(-math.inf, 2)}
    shape = completion_logprobs([b], [report], TokenPlaces(Vocabulary(tiny_oracle.tokenizer)))
    assert shape["token_logprobs"] == [LOWEST]
    assert shape["top_logprobs"] == [{f"token_id:{a}": -0.5, "�": LOWEST}]
