"""Where cache breakpoints lie: held against the tokens that conversations have in common."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import tiny

from kvreclaim.engine.api.chat import PlainText
from kvreclaim.server.anthropic.fields import MessageRequest
from kvreclaim.server.anthropic.prompt import render
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.shared.service import Service

CALLS = "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
TEMPLATES = {
    "tools first": (
        "{% if tools %}{{ tools | tojson }}\n{% endif %}"
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}" + CALLS + "</{{ m.role }}>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "tools behind the system prompt": (
        "<system>{% if messages[0].role == 'system' %}{{ messages[0].content }}{% else %}default{% endif %}"
        "{% for tool in tools or [] %}\n{{ tool | tojson }}{% endfor %}</system>\n"
        "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }}" + CALLS + "<end>\n"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    ),
    "trimmed, last turn special": (
        "{% for tool in tools or [] %}[{{ tool.function.name }}|{{ tool.function.description }}]{% endfor %}"
        "{% for m in messages %}{{ '\n' }}{{ m.role }}:"
        "{% if loop.last and m.role == 'assistant' %}<think></think>{% endif %}"
        "{{ m.content | trim }}" + CALLS + "{% endfor %}"
        "{% if add_generation_prompt %}\nassistant:{% endif %}"
    ),
}
IN_ORDER = ("tools first", "trimmed, last turn special")
MARK = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}


def tool(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "description": f"the {name}", "input_schema": {"type": "object"}, **more}


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **more}


def rendered(template: str, **body: Any) -> tuple[list[int], list[int]]:
    """(token ids, positions of the breakpoints)"""
    tokenizer = tiny.tokenizer()
    engine = SimpleNamespace(name="tiny", tokenizer=tokenizer)
    config = SimpleNamespace(chat_template=TEMPLATES[template], system="")
    form = SimpleNamespace(writes_tools=False)
    service = SimpleNamespace(engine=engine, config=config, plain=PlainText(tokenizer), output_format=form)
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "hello"}], **body}
    result = render(MessageRequest.model_validate(body), cast(Service, service))
    return result.token_ids, [point.num_tokens for point in result.breakpoints]


def shared(a: list[int], b: list[int]) -> int:
    """Leading tokens that both have."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def conversation(**marked: Any) -> dict[str, Any]:
    """Everything that can be marked, with a mark where one is given."""

    def mark(place: str) -> dict[str, Any]:
        return {"cache_control": marked[place]} if place in marked else {}

    use = {"type": "tool_use", "id": "call-7", "name": "two", "input": {"i": "open"}, **mark("use")}
    content = [text("inner end", **mark("inner")), text("the result", **mark("inner2"))]
    result = {"type": "tool_result", "tool_use_id": "call-7", "content": content, **mark("result")}
    return {
        "tools": [tool("one", **mark("tool1")), tool("two", **mark("tool2"))],
        "system": [text("system-a", **mark("system1")), text("system-b", **mark("system2"))],
        "messages": [
            {"role": "user", "content": [text("user-a", **mark("user1")), text("user-b", **mark("user2"))]},
            {"role": "assistant", "content": [text("answer-a", **mark("answer")), use]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": [text("answer-b", **mark("answer2"))]},
            {"role": "user", "content": [text("last word", **mark("last"))]},
        ],
    }


def after(place: str) -> dict[str, Any]:
    """The conversation with everything behind this place replaced."""
    body = conversation()
    places = {"tool1": (1, 0, 0), "tool2": (2, 0, 0), "system1": (2, 1, 0), "system2": (2, 2, 0)}
    num_tools, num_system, _ = places.get(place, (2, 2, 0))
    other = {"role": "user", "content": "?!"}
    body["tools"] = body["tools"][:num_tools] + [tool("?!", description="?!")] * (num_tools < 2)
    body["system"] = body["system"][:num_system] + [text("?!")] * (num_system < 2)
    messages = body["messages"]
    user1, answer, result = messages[0]["content"], messages[1]["content"], messages[2]["content"][0]
    history = {
        "user1": [{"role": "user", "content": [user1[0], text("?!")]}],
        "user2": [messages[0], {"role": "assistant", "content": "?!"}, other],
        "answer": [messages[0], {"role": "assistant", "content": [answer[0], text("?!")]}, other],
        "use": [
            *messages[:2],
            {"role": "user", "content": [{**result, "content": "?!"}]},
            *messages[3:],
        ],
        "inner": [
            *messages[:2],
            {"role": "user", "content": [{**result, "content": [result["content"][0], text("?!")]}]},
            *messages[3:],
        ],
        "inner2": [*messages[:3], {"role": "assistant", "content": "?!"}, other],
        "result": [*messages[:3], {"role": "assistant", "content": "?!"}, other],
        "answer2": [*messages[:4], other],
        "last": messages,
    }
    body["messages"] = history.get(place, [other])
    return body


BLOCKS = {
    "tool1": ("the one", "the two"),
    "tool2": ("the two", "system-a"),
    "system1": ("system-a", "system-b"),
    "system2": ("system-b", "user-a"),
    "user1": ("user-a", "user-b"),
    "user2": ("user-b", "answer-a"),
    "answer": ("answer-a", "call-7"),
    "use": ('"i": "open"', "inner end"),
    "inner": ("inner end", "the result"),
    "inner2": ("the result", "answer-b"),
    "result": ("the result", "answer-b"),
    "answer2": ("answer-b", "last word"),
    "last": ("last word", "nothing"),
}
"""A text of each block, and one of the next block."""


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("place", BLOCKS)
def test_a_breakpoint_is_what_conversations_that_agree_up_to_it_have_in_common(
    template: str, place: str
) -> None:
    ids, points = rendered(template, **conversation(**{place: MARK}))
    assert ids == rendered(template, **conversation())[0], "a mark changes no token"
    covered = tiny.tokenizer().decode(ids[: points[0]])
    marked, following = BLOCKS[place]
    assert marked in covered
    if not (place == "tool2" and template not in IN_ORDER):
        assert following not in covered
    if not (place.startswith("tool") and template not in IN_ORDER):
        assert points[0] <= shared(ids, rendered(template, **after(place))[0])


def test_positions_by_hand() -> None:
    body = {"system": [text("ab", cache_control=MARK)], "messages": [{"role": "user", "content": "xy"}]}
    for template, before in (
        ("tools first", "<system>ab</system>\n<user>"),
        ("trimmed, last turn special", "\nsystem:ab\nuser:"),
    ):
        ids, points = rendered(template, **body)
        assert ids[: points[0]] == tiny.tokenizer().encode(before)


def test_tools_behind_the_system_prompt_are_covered_with_it() -> None:
    template = "tools behind the system prompt"
    decode = tiny.tokenizer().decode
    ids, points = rendered(template, **conversation(tool2=MARK))
    assert decode(ids[: points[0]]).startswith("<system>system-a\nsystem-b{")
    assert decode(ids[points[0] :]).startswith("</system>")
    # A mark on the system prompt covers them too: they come first in Anthropic's order.
    ids, points = rendered(template, **conversation(system2=MARK))
    assert decode(ids[points[0] :]).startswith("user-a")
    # Without a system prompt nothing else comes into it.
    body = {**conversation(tool2=MARK), "system": None}
    ids, points = rendered(template, **body)
    assert decode(ids[points[0] :]).startswith("user-a")


def test_four_breakpoints_are_as_each_alone() -> None:
    for template in TEMPLATES:
        places = ("tool2", "system2", "user2", "last")
        alone = [rendered(template, **conversation(**{place: MARK}))[1][0] for place in places]
        ids, points = rendered(template, **conversation(**dict.fromkeys(places, MARK)))
        assert points == alone == sorted(points)
        assert points[-1] == len(ids), "the last block's covers the whole prompt"


def test_the_automatic_breakpoint_is_the_last_block() -> None:
    for template in TEMPLATES:
        ids, points = rendered(template, **conversation(), cache_control=HOUR)
        assert points == [len(ids)]
        assert rendered(template, **conversation(last=MARK), cache_control=MARK)[1] == [len(ids)]
    with pytest.raises(ApiError, match="cache_control has ttl 1h, but the last block's own has 5m"):
        rendered("tools first", **conversation(last=MARK), cache_control=HOUR)


def test_a_prefill_can_be_marked() -> None:
    messages = [{"role": "user", "content": "the?"}, {"role": "assistant", "content": [text("so")]}]
    for template in TEMPLATES:
        plain = rendered(template, messages=messages)[0]
        messages[1]["content"] = [text("so", cache_control=MARK)]
        assert rendered(template, messages=messages) == (plain, [len(plain)])


def test_at_most_four() -> None:
    body = conversation(tool1=MARK, tool2=MARK, system1=MARK, user1=MARK, last=MARK)
    with pytest.raises(ApiError, match=r"set 5 times, at most 4 .* messages.4.content.0"):
        rendered("tools first", **body)
    body = conversation(tool1=MARK, tool2=MARK, system1=MARK, user1=MARK)
    assert len(rendered("tools first", **body)[1]) == 4
    with pytest.raises(ApiError, match="set 5 times"):
        rendered("tools first", **body, cache_control=MARK)


def test_longer_ones_come_first() -> None:
    result = rendered("tools first", **conversation(system2=HOUR, last=MARK))
    assert len(result[1]) == 2
    with pytest.raises(ApiError, match=r"messages.0.content.0 has ttl 1h after one of 5m \(tools.1\)"):
        rendered("tools first", **conversation(tool2=MARK, user1=HOUR))
