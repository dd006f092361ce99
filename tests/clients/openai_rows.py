"""OpenAI's Python client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
from rows import SAY, TOOL, WEATHER, At, City, Rows, check, check_text

ROWS = Rows()
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    ],
}
HISTORY = [*SAY, CALL, {"role": "tool", "tool_call_id": "c1", "content": "7 degrees"}]


def client(at: At) -> openai.OpenAI:
    return openai.OpenAI(base_url=at.v1, api_key="any", max_retries=0, timeout=120)


def chat(at: At, **fields: Any) -> Any:
    given = {"model": at.model, "messages": SAY, "max_tokens": 8, **fields}
    with client(at) as each:
        answer = each.chat.completions.create(**given)
        return list(answer) if given.get("stream") else answer


@ROWS.add("openai", "models")
def models(at: At) -> None:
    with client(at) as each:
        check(at.model in [model.id for model in each.models.list()], "not listed")


@ROWS.add("openai", "chat, streamed with usage")
def plain(at: At) -> None:
    chunks = chat(at, stream=True, stream_options={"include_usage": True}, temperature=0)
    text = [choice.delta.content for chunk in chunks for choice in chunk.choices]
    check_text(chat(at, temperature=0).choices[0].message.content, text)
    check(chunks[-1].usage.completion_tokens > 0, chunks[-1])


@ROWS.add("openai", "n, seed, stop, penalties, logit_bias, log-probabilities")
def sampled(at: At) -> None:
    fields: dict[str, Any] = {"n": 2, "seed": 3, "stop": ["\n\n\n"], "top_p": 0.9, "presence_penalty": 0.1}
    fields |= {"logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2}
    check(len(chat(at, **fields).choices) == 2, "not two")


@ROWS.add("openai", "ordinary fields: store, metadata, service_tier, user, prompt_cache_key, …")
def ordinary(at: At) -> None:
    fields: dict[str, Any] = {"store": False, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u"}
    fields |= {"parallel_tool_calls": True, "modalities": ["text"], "prompt_cache_key": "k"}
    fields |= {"prediction": {"type": "content", "content": "Bern"}, "safety_identifier": "u"}
    fields |= {"verbosity": "medium", "tool_choice": "auto"}
    check(chat(at, **fields).choices, "nothing")


@ROWS.add("openai", "tools, and a call with its result in the history")
def tools(at: At) -> None:
    check(chat(at, tools=[TOOL]).choices, "nothing")
    check(chat(at, tools=[TOOL], messages=HISTORY, stream=True), "nothing")


@ROWS.add("openai", "completions: batch, echo with log-probabilities, streamed")
def completions(at: At) -> None:
    with client(at) as each:
        given: dict[str, Any] = {"model": at.model, "max_tokens": 4}
        check(len(each.completions.create(prompt=["a", "b"], **given).choices) == 2, "not two")
        echo = each.completions.create(prompt="one two", echo=True, logprobs=1, **given)
        check(echo.choices[0].text.startswith("one"), echo)
        check(list(each.completions.create(prompt="a", stream=True, **given)), "nothing")


@ROWS.add("openai", "eight at once, asynchronous")
def together(at: At) -> None:
    async def ask() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=at.v1, api_key="any", max_retries=0) as each:
            create = each.chat.completions.create
            return await asyncio.gather(
                *(create(model=at.model, messages=SAY, max_tokens=4) for _ in range(8))
            )

    check(len(asyncio.run(ask())) == 8, "not eight")


@ROWS.add("openai", "response_format json_object")
def json_object(at: At) -> None:
    answer = chat(at, response_format={"type": "json_object"}, max_tokens=60)
    whole = answer.choices[0].finish_reason == "stop"
    check(not whole or isinstance(json.loads(answer.choices[0].message.content), dict), answer)


@ROWS.add("openai", "chat.completions.parse")
def parse(at: At) -> None:
    with client(at) as each:
        answer = each.chat.completions.parse(
            model=at.model, messages=SAY, response_format=City, max_tokens=250, seed=1
        )
    check(isinstance(answer.choices[0].message.parsed, City), answer)


def forced(at: At, choice: Any, **function: Any) -> None:
    tool = {"type": "function", "function": {**TOOL["function"], **function}}
    answer = chat(at, tools=[tool], tool_choice=choice, max_tokens=250, seed=1)
    call, *_ = answer.choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    check(call.function.name == "weather" and arguments.keys() == WEATHER["properties"].keys(), call)


@ROWS.add("openai", "tool_choice required")
def required(at: At) -> None:
    forced(at, "required")


@ROWS.add("openai", "tool_choice of a function, strict")
def named(at: At) -> None:
    forced(at, {"type": "function", "function": {"name": "weather"}}, strict=True)


@ROWS.add("openai", "responses: whole, streamed, continued")
def responses(at: At) -> None:
    with client(at) as each:
        given: dict[str, Any] = {"model": at.model, "max_output_tokens": 16}
        first = each.responses.create(input="Name a city.", **given)
        check(first.output_text, first)
        events = list(each.responses.create(input="Name a city.", stream=True, **given))
        check(events[-1].type in ("response.completed", "response.incomplete"), events[-1])
        again = each.responses.create(input="Another.", previous_response_id=first.id, **given)
        check(again.usage.input_tokens > first.usage.input_tokens, again)


@ROWS.add("openai", "responses.parse, and a forced call")
def responses_parsed(at: At) -> None:
    with client(at) as each:
        given: dict[str, Any] = {"model": at.model, "max_output_tokens": 250}
        parsed = each.responses.parse(input="Name a city.", text_format=City, **given)
        check(isinstance(parsed.output_parsed, City), parsed)
        tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}
        called = each.responses.create(input="Weather?", tools=[tool], tool_choice="required", **given)
        check(called.output[0].type == "function_call", called.output)


if __name__ == "__main__":
    ROWS.main()
