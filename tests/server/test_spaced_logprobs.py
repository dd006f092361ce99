"""Log-probabilities of models whose decoder takes the first space of a text: tokens join to the text,
offsets count the spaces, and no alternative is lost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest
import tiny
import tiny_spaced
from openai.types.completion_choice import CompletionChoice
from running import MODEL, openai_client, running_server
from transformers import PreTrainedTokenizerFast

from kvreclaim import LLM

TOP = 5
SAMPLED: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "seed": 3, "temperature": 1.5}
MESSAGES = [{"role": "user", "content": "the end"}]


@pytest.fixture(scope="module", params=tiny_spaced.KINDS)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return tiny_spaced.tokenizer(request.param)


@pytest.fixture(scope="module")
def client(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[openai.OpenAI]:
    directory = tiny.save_model("llama", tmp_path_factory.mktemp("spaced"))
    tokenizer.save_pretrained(directory)
    with running_server(LLM(directory, num_blocks=64)) as server, openai_client(server) as client:
        yield client


@pytest.fixture
def fields(tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    """Fields of a request that samples words; the alternatives are the model's own, any tokens."""
    words = tokenizer.convert_tokens_to_ids(tiny_spaced.WORDS)
    return SAMPLED | {"logit_bias": {str(word): 100 for word in words}}


@pytest.fixture
def prompt(tokenizer: PreTrainedTokenizerFast) -> list[int]:
    return tokenizer.convert_tokens_to_ids(["<s>", "▁the", "▁end"])


def completed(client: openai.OpenAI, *, stream: bool, **fields: Any) -> CompletionChoice:
    """Return the choice; a stream's is its chunks put together."""
    answer = client.completions.create(**fields, stream=stream)
    whole, *more = [chunk.choices[0] for chunk in (answer if stream else [answer]) if chunk.choices]
    for choice in more:
        whole.text += choice.text
        for name, values in choice.logprobs.model_dump().items():
            getattr(whole.logprobs, name).extend(values)
    return whole


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_of_a_completion(
    client: openai.OpenAI, fields: dict[str, Any], prompt: list[int], *, echo: bool, stream: bool
) -> None:
    choice = completed(client, **fields, prompt=prompt, logprobs=TOP, echo=echo, stream=stream)
    found, num_special = choice.logprobs, int(echo)
    tokens = found.tokens[num_special:]  # the first one of the prompt adds nothing
    assert len(tokens) == 16 + 2 * echo
    assert "".join(tokens) == choice.text
    assert " " in choice.text
    assert choice.text.startswith("the end" if echo else "")
    lengths = [0, *accumulate(map(len, tokens))][:-1]
    assert found.text_offset == [0] * num_special + lengths
    owns, tops = found.token_logprobs[num_special:], found.top_logprobs[num_special:]
    for token, own, top in zip(tokens, owns, tops, strict=True):
        assert top[token] == own
        likelier = sum(value > own for value in top.values())
        assert len(top) == TOP + (likelier >= TOP)


def test_without_alternatives(client: openai.OpenAI, fields: dict[str, Any], prompt: list[int]) -> None:
    found = completed(client, **fields, prompt=prompt, logprobs=0, stream=False).logprobs
    pairs = zip(found.tokens, found.token_logprobs, strict=True)
    assert all(top.items() >= {pair} for top, pair in zip(found.top_logprobs, pairs, strict=True))
    assert all(len(top) == 1 for top in found.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_cuts_the_text_and_no_token(
    client: openai.OpenAI, fields: dict[str, Any], prompt: list[int], stream: bool
) -> None:
    whole = completed(client, **fields, prompt=prompt, logprobs=TOP, stream=False)
    stop = whole.text[9:12]
    cut = completed(client, **fields, prompt=prompt, logprobs=TOP, stop=stop, stream=stream)
    assert cut.text == whole.text[: whole.text.find(stop)]
    text, num_tokens = "".join(cut.logprobs.tokens), len(cut.logprobs.tokens)
    assert text.startswith(cut.text + stop)
    for name, values in cut.logprobs.model_dump().items():
        assert values == getattr(whole.logprobs, name)[:num_tokens]


@pytest.mark.parametrize("stream", [False, True])
def test_of_a_chat(client: openai.OpenAI, fields: dict[str, Any], stream: bool) -> None:
    more = {"messages": MESSAGES, "logprobs": True, "top_logprobs": TOP, "stream": stream}
    answer = client.chat.completions.create(**fields, **more)
    choices = [chunk.choices[0] for chunk in (answer if stream else [answer])]
    text = "".join((each.delta if stream else each.message).content or "" for each in choices)
    found = [entry for each in choices if each.logprobs for entry in each.logprobs.content]
    assert len(found) == 16
    assert " " in text
    assert "".join(entry.token for entry in found) == text
    assert b"".join(bytes(entry.bytes) for entry in found) == text.encode()
    assert all(len(entry.top_logprobs) == TOP for entry in found)


def test_prompt_logprobs(
    client: openai.OpenAI, fields: dict[str, Any], prompt: list[int], tokenizer: PreTrainedTokenizerFast
) -> None:
    extra = {"prompt_logprobs": TOP}
    [_, *found] = completed(client, **fields, prompt=prompt, extra_body=extra, stream=False).prompt_logprobs
    given = [entry[str(token)]["decoded_token"] for entry, token in zip(found, prompt[1:], strict=True)]
    assert given == ["the", " end"]
