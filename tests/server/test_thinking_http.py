"""A budget of reasoning, and its count, in both dialects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import web
from running import MODEL, Running, openai_client, running_server
from speaking import biased

from kvreclaim import LLM
from kvreclaim.server.anthropic.routes import AnsweredMessage
from kvreclaim.server.openai.schemas import ChatCompletion

TEMPLATE = (
    "{% for m in messages %}{{ ' <think> ' + m.reasoning_content + ' </think>' if m.reasoning_content }}"
    " {{ m.content }}{% endfor %}{{ ' w30' if enable_thinking }}{{ ' <think>' if begin }}"
)
USER = [{"role": "user", "content": "w20 w21"}]
BEGUN = {"chat_template_kwargs": {"begin": True}}
THOUGHT = ("<think>", "Let", "me", "</think>", "look.")


@pytest.fixture(scope="module")
def server(speaker: LLM) -> Iterator[Running]:
    with running_server(speaker) as server:
        yield server


def chat(server: Running, *words: str, status: int = 200, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": USER, **biased(*words), **fields}
    answer = web.post(f"{server.base_url}/v1/chat/completions", json=body)
    assert answer.status_code == status, answer.text
    if status == 200 and not fields.get("stream"):
        ChatCompletion.model_validate(answer.json())
    return answer.json()


@pytest.mark.parametrize(
    ("words", "fields", "reasoning", "content", "count"),
    [
        (THOUGHT, {}, "Let me", "look.", 2),
        (THOUGHT, {"thinking_token_budget": 5}, "Let me", "look.", 2),
        (THOUGHT, {"thinking_token_budget": 1}, "Let", "me look.", 1),
        (THOUGHT, {"thinking_token_budget": 0}, None, "Let me look.", 0),
        (THOUGHT[1:], {"thinking_token_budget": 1, **BEGUN}, "Let", "me look.", 1),
        (("look.",), {"thinking_token_budget": 1}, None, "look.", 0),
    ],
)
def test_a_budget_in_a_chat(
    server: Running, words: tuple, fields: dict[str, Any], reasoning: str | None, content: str, count: int
) -> None:
    answer = chat(server, *words, **fields)
    message = answer["choices"][0]["message"]
    assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
    assert message.get("reasoning") == reasoning
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": count}


def test_both_names_of_the_reasoning_in_a_stream(server: Running) -> None:
    with openai_client(server) as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=USER,
            extra_body=biased(*THOUGHT),
            stream=True,
            stream_options={"include_usage": True},
        )
        *chunks, last = stream
    deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
    for name in ("reasoning", "reasoning_content"):
        assert "".join(delta.get(name) or "" for delta in deltas) == "Let me"
    assert last.usage.completion_tokens_details.reasoning_tokens == 2


def test_either_name_can_be_sent_back(server: Running, speaker: LLM) -> None:
    prompt = "w20 w21 <think> Let me </think> look. w20 w21"
    for names in (("reasoning",), ("reasoning_content",), ("reasoning", "reasoning_content")):
        turn = {"role": "assistant", "content": "look.", **dict.fromkeys(names, "Let me")}
        usage = chat(server, "me", messages=[*USER, turn, *USER])["usage"]
        assert usage["prompt_tokens"] == len(speaker.tokenizer.encode(prompt, add_special_tokens=False))
    turn = {"role": "assistant", "content": "look.", "reasoning": "Let", "reasoning_content": "me"}
    error = chat(server, "me", messages=[*USER, turn, *USER], status=400)["error"]
    assert error["param"] == "messages.1.reasoning"


def message(server: Running, *words: str, **fields: Any) -> AnsweredMessage:
    with anthropic.Anthropic(base_url=server.base_url, api_key="any", max_retries=0) as client:
        given = {"model": MODEL, "max_tokens": 20, "messages": USER, "extra_body": biased(*words), **fields}
        whole = client.messages.create(**given)
        with client.messages.stream(**given) as stream:
            streamed = stream.get_final_message()
    pairs = zip(streamed.content, whole.content, strict=True)
    assert all(one.model_dump(exclude={"parsed_output"}) == other.model_dump() for one, other in pairs)
    return AnsweredMessage.model_validate(whole.model_dump(exclude_unset=True))


def test_extended_thinking(server: Running, speaker: LLM) -> None:
    """The template's switch is set where it has one, and the budget ends the reasoning."""
    found = message(server, *THOUGHT, thinking={"type": "enabled", "budget_tokens": 1})
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert (found.content[0].thinking, found.content[1].text) == ("Let", "me look.")
    assert found.usage.output_tokens_details.thinking_tokens == 1
    plain, adaptive = (
        message(server, *THOUGHT, thinking=thinking)
        for thinking in (anthropic.NOT_GIVEN, {"type": "adaptive"})
    )
    assert found.content != plain.content == adaptive.content

    def num_prompt(found: AnsweredMessage) -> int:
        return found.usage.input_tokens + found.usage.cache_read_input_tokens

    assert num_prompt(found) == num_prompt(adaptive) == num_prompt(plain) + 1


@pytest.mark.parametrize(
    ("thinking", "reason"),
    [
        ({"type": "enabled"}, "needs budget_tokens"),
        ({"type": "adaptive", "budget_tokens": 5}, "takes no budget_tokens"),
        ({"type": "enabled", "budget_tokens": 20}, "max_tokens is 20"),
        ({"type": "enabled", "budget_tokens": 0}, "thinking.budget_tokens"),
        ({"type": "enabled", "budget_tokens": 5, "display": "omitted"}, "thinking.display"),
        ({"type": "between_tools"}, "thinking.type"),
    ],
)
def test_thinking_that_is_refused(server: Running, thinking: dict[str, Any], reason: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=reason):
        message(server, *THOUGHT, thinking=thinking)


def test_without_a_reasoning_parser_there_is_no_budget(speaker: LLM) -> None:
    with running_server(speaker.sibling(num_blocks=64), reasoning_parser="none") as server:
        with pytest.raises(anthropic.BadRequestError, match="knows no reasoning of this model"):
            message(server, "me", thinking={"type": "enabled", "budget_tokens": 5})
        assert chat(server, "me", thinking_token_budget=1, status=400)["error"]["param"] == (
            "thinking_token_budget"
        )
        assert "completion_tokens_details" not in chat(server, "me")["usage"]


def test_a_budget_goes_with_no_beams(server: Running) -> None:
    body = {"model": MODEL, "messages": USER, "thinking_token_budget": 1, "use_beam_search": True}
    answer = web.post(f"{server.base_url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "thinking_token_budget"


def test_a_beam_searchs_reasoning_is_counted(server: Running) -> None:
    body = {"model": MODEL, "messages": USER, "use_beam_search": True, "max_tokens": 4}
    body["chat_template_kwargs"] = {"begin": True}
    answer = web.post(f"{server.base_url}/v1/chat/completions", json=body).json()
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0


def test_openai_client_reads_the_count(server: Running) -> None:
    with openai_client(server) as client:
        answer = client.chat.completions.create(model=MODEL, messages=USER, extra_body=biased(*THOUGHT))
    assert isinstance(answer, openai.types.chat.ChatCompletion)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 2
