"""`truncation: "auto"`: the oldest items are dropped until the prompt fits."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import web
from responding import ask, refused
from running import Running, running_server
from speaking import biased

from kvreclaim import LLM
from kvreclaim.server.responses.translate import fitting

TEMPLATE = (
    "{% for m in messages %} {{ m.role }}: {{ m.content }}"
    "{% for c in m.tool_calls or [] %} calls{% endfor %}{% endfor %}{# <tool_call> #}"
)
SYSTEM = {"type": "message", "role": "system", "content": "w10"}
USER = {"type": "message", "role": "user", "content": "w20"}
SAYS = {"type": "message", "role": "assistant", "content": "me"}


def call(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": "f", "arguments": "{}"}


def output(name: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": name, "output": "w30"}


CHAT = [SYSTEM, USER, SAYS, USER, SAYS, USER]
AGENT = [USER, call("a"), call("b"), output("a"), output("b"), call("a"), output("a"), SAYS]


@pytest.mark.parametrize(
    ("items", "most", "kept"),
    [
        (CHAT, 6, [0, 1, 2, 3, 4, 5]),
        (CHAT, 5, [0, 3, 4, 5]),
        (CHAT, 3, [0, 5]),
        (CHAT, 1, [0, 5]),
        (AGENT, 8, [*range(8)]),
        (AGENT, 7, [*range(1, 8)]),
        (AGENT, 6, [5, 6, 7]),
        (AGENT, 2, [7]),
        (AGENT[:5], 3, [1, 2, 3, 4]),
        ([SYSTEM], 0, [0]),
        ([SAYS, USER], 1, [1]),
    ],
)
def test_what_stays(items: list[Any], most: int, kept: list[int]) -> None:
    """Whole turns of the user first; then items, a result never without its call."""
    assert fitting(items, lambda places: len(places) <= most) == kept


@pytest.mark.parametrize(("most", "kept"), [(10, 0), (8, 2), (7, 2)])
def test_a_prompt_that_no_template_writes(most: int, kept: int) -> None:
    """Many templates refuse a conversation without a user's message."""
    items = [USER, SAYS, *AGENT]

    def fits(places: list[int]) -> bool | None:
        return len(places) <= most if any(items[place] == USER for place in places) else None

    assert fitting(items, fits) == [*range(kept, 10)]


def test_many_items_take_no_room_each() -> None:
    tracemalloc.start()
    assert len(fitting([USER] * 4000, lambda places: len(places) <= 10)) == 10
    assert tracemalloc.get_traced_memory()[1] < 2 << 20
    tracemalloc.stop()


@pytest.fixture(scope="module")
def server(speaker_dir: Path) -> Iterator[Running]:
    llm = LLM(speaker_dir, num_blocks=64, max_model_len=96)
    with running_server(llm) as server:
        yield server


def prompt_of(server: Running, monkeypatch: pytest.MonkeyPatch, **body: Any) -> tuple[list[int], dict]:
    """Return the prompt that the model read, and the response."""
    read: list[list[int]] = []
    submit = server.service.submit

    def spy(request_id: str, specs: list[Any]) -> Any:
        read.append(specs[0].prompt_token_ids)
        return submit(request_id, specs)

    with monkeypatch.context() as patched:
        patched.setattr(server.service, "submit", spy)
        response = ask(server, **body, **biased("me"))
    return read[0], response


def tokens(server: Running, text: str) -> list[int]:
    return server.service.tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(("limit", "room"), [(None, 12), (40, 40)])
def test_the_latest_turns_that_leave_room(
    server: Running, monkeypatch: pytest.MonkeyPatch, limit: int | None, room: int
) -> None:
    items = [
        message
        for number in range(20, 60)
        for message in ({"role": "user", "content": f"w{number}"}, {"role": "assistant", "content": "me"})
    ]
    given = [{"role": "system", "content": "w10"}, *items, {"role": "user", "content": "w60"}]
    body = {"input": given, "instructions": "w11", "truncation": "auto", "max_output_tokens": limit}
    prompt, response = prompt_of(server, monkeypatch, **body)
    turns = [f"user: w{number} assistant: me" for number in range(20, 60)]
    wanted = [tokens(server, " ".join(["system: w11 w10", *turns[cut:], "user: w60"])) for cut in range(41)]
    assert prompt == next(each for each in wanted if len(each) + room <= 96)
    assert response["truncation"] == "auto"
    page = web.get(f"{server.base_url}/v1/responses/{response['id']}/input_items", params={"limit": 100})
    assert len(page.json()["data"]) == len(given)


def test_a_conversation_goes_on_for_ever(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    before = None
    for number in range(20, 60):
        body = {"input": f"w{number}", "truncation": "auto", "previous_response_id": before}
        prompt, response = prompt_of(server, monkeypatch, **body)
        before = response["id"]
    assert prompt[-2:] == tokens(server, "user: w59")
    assert 96 - 12 - 4 <= len(prompt) <= 96 - 12
    param, message = refused(server, input="w20", previous_response_id=before)
    assert param == "input", message


def test_refusals(server: Running) -> None:
    assert refused(server, input="w20 " * 100, truncation="auto")[0] == "input"
    assert refused(server, input="w20 " * 9000, truncation="auto")[0] == "input"
    assert refused(server, input="w20", truncation="auto", documents=["w30"])[0] == "truncation"
    assert refused(server, input="w20", truncation="middle")[0] == "truncation"
    param, message = refused(server, input="w20", chat_template_kwargs={"messages": 1}, truncation="auto")
    assert (param, message[:31]) == ("chat_template_kwargs", "chat_template_kwargs sets 'mess")
    items = [{"role": "user", "content": "w20"}, {**output("x")}]
    assert refused(server, input=items, truncation="auto")[0] == "input.1.call_id"
