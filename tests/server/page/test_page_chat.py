"""The chat in headless Chromium, beside the API's own answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import web
from playwright.sync_api import Page, Route, expect
from running import MODEL, Running, running_server
from steering import halted

from kvreclaim import LLM, CompressionConfig, demo_model
from kvreclaim.cli.chat.commands import read_messages

OpenPage = Callable[..., Page]
Messages = list[dict[str, str]]

LONG = " ".join(["GO sun wave sky"] * 150)
FULL_STORAGE = """() => {
  Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError'); }; }"""
IN_BUDGET = {"policy": "query_mixture", "budget": 256}


@pytest.fixture
def chat(page_server: Running, open_page: OpenPage) -> Page:
    """Greedy, at most twelve tokens an answer."""
    return greedy(open_page(page_server))


def greedy(page: Page, *, max_tokens: int = 12) -> Page:
    page.locator("#chat > details > summary").click()
    page.fill("#chat-temperature", "0")
    page.fill("#chat-max-tokens", str(max_tokens))
    return page


def send(page: Page, text: str, *, wait: bool = True) -> None:
    page.fill("#chat-message", text)
    page.press("#chat-message", "Enter")
    if wait:
        ended(page)


def ended(page: Page) -> None:
    expect(page.locator("#chat-stop")).to_be_disabled()


def answers(page: Page) -> list[str]:
    return page.locator("#chat .assistant .text").all_text_contents()


def complete(server: Running, messages: Messages, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 12, **fields}
    answer: dict[str, Any] = web.post(f"{server.base_url}/v1/chat/completions", json=body).json()
    return answer


def text_of(server: Running, messages: Messages, **fields: Any) -> str:
    return str(complete(server, messages, **fields)["choices"][0]["message"]["content"])


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def test_turns_build_on_each_other(page_server: Running, chat: Page) -> None:
    chat.fill("#chat-system", "GO moon")
    messages: Messages = [{"role": "system", "content": "GO moon"}]
    for text in ("GO wind", "sun sky"):
        send(chat, text)
        messages.append(user(text))
        messages.append(assistant(text_of(page_server, messages)))
    assert answers(chat) == [each["content"] for each in messages if each["role"] == "assistant"]
    expect(chat.locator("#answer-news")).to_contain_text(messages[-1]["content"])
    expect(chat.locator("#answer-news")).to_contain_text("12 tokens")


def test_an_answer_streams_with_its_blocks_and_is_stopped(page_server: Running, chat: Page) -> None:
    chat.fill("#chat-max-tokens", "")
    with halted(page_server, num_tokens=100) as wait:
        send(chat, "GO wind", wait=False)
        wait()
        expect(chat.locator("#requests tbody tr")).to_have_count(1)
        answer = chat.locator("#chat .assistant")
        expect(answer).to_contain_text("7 blocks")  # 2 tokens of prompt and 100
        swatches = chat.locator("#chat .assistant .swatch, #requests .swatch")
        colours = swatches.evaluate_all("all => all.map((each) => each.style.background)")
        assert len(colours) == 2
        assert len(set(colours)) == 1
        chat.keyboard.press("Escape")
        expect(answer.locator(".error")).to_have_text("Stopped.")
    expect(chat.locator("[data-chart=blocks] [data-value]")).to_have_text("0 of 1,024")
    assert text_of(page_server, [user("GO wind")], max_tokens=90).startswith(answers(chat)[0][:80])
    chat.fill("#chat-max-tokens", "4")
    send(chat, "sun")  # what there is of the stopped answer is part of the conversation
    assert len(answers(chat)) == 2


def test_retry_and_edit_are_versions(page_server: Running, chat: Page) -> None:
    send(chat, "GO wind")
    send(chat, "sun sky")
    first, second = answers(chat)
    chat.fill("#chat-max-tokens", "3")
    chat.locator("#chat .assistant >> nth=0 >> text=Retry").click()
    ended(chat)
    assert answers(chat) == [text_of(page_server, [user("GO wind")], max_tokens=3)]
    expect(chat.locator("#chat .assistant .buttons")).to_contain_text("2 / 2")
    chat.get_by_label("Earlier version").click()
    assert answers(chat) == [first, second]  # with what followed it
    chat.locator("#chat .user >> nth=1 >> text=Edit").click()
    editor = chat.get_by_label("Edit the message")
    expect(editor).to_be_focused()
    expect(editor).to_have_value("sun sky")
    editor.press("Escape")
    expect(editor).to_have_count(0)
    expect(chat.locator("#chat .user >> nth=1 >> text=Edit")).to_be_focused()
    chat.keyboard.press("Enter")
    editor.fill("moon")
    editor.press("Enter")
    ended(chat)
    messages = [user("GO wind"), assistant(first), user("moon")]
    assert answers(chat) == [first, text_of(page_server, messages, max_tokens=3)]
    chat.locator("#chat .user >> nth=1").get_by_label("Earlier version").click()
    assert answers(chat) == [first, second]


def test_the_budget_frees_what_the_usage_says(page_server: Running, chat: Page) -> None:
    slider, words = chat.locator("#chat-budget"), chat.locator("#chat-budget-words")
    expect(words).to_have_text("all, up to 8.0 MiB")
    send(chat, LONG)
    expect(chat.locator("#chat .assistant .note")).to_contain_text(
        "Nothing freed. 39 blocks, 1.2 MiB, hold 612 tokens: 100 %"
    )
    slider.focus()
    chat.keyboard.press("Home")
    expect(words).to_have_text("512.0 KiB: 256 tokens, 6.3 % of a full context")
    expect(slider).to_have_attribute("aria-valuetext", "512.0 KiB: 256 tokens, 6.3 % of a full context")
    chat.select_option("#chat-policy", "query_mixture")
    chat.locator("#chat .assistant >> text=Retry").click()
    ended(chat)
    right = complete(page_server, [user(LONG)], kv_compression=IN_BUDGET)
    assert answers(chat) == [right["choices"][0]["message"]["content"]]
    cache = right["usage"]["kv_cache"]
    assert cache["blocks_freed"] > 20
    figures = chat.locator("#chat .assistant .note").first.inner_text()
    assert (
        f"Compression freed {cache['blocks_freed']} blocks, {cache['blocks_freed'] * 32:.1f} KiB." in figures
    )
    assert f"{cache['final_blocks']} blocks" in figures
    assert f"hold 612 tokens: {100 * cache['final_blocks'] / 39:.0f} % of the full cache" in figures


def test_the_servers_own_budget_holds_until_another_is_chosen(open_page: OpenPage) -> None:
    llm = LLM(demo_model(), num_blocks=256, compression=CompressionConfig("knorm", budget=256))
    with running_server(llm, max_kv_budget=512) as server:
        page = greedy(open_page(server, refused=True))
        words = page.locator("#chat-budget-words")
        expect(words).to_have_text("512.0 KiB: as the server, knorm, 256 tokens per KV head")
        expect(page.locator("#chat-budget-reset")).to_be_hidden()
        send(page, LONG)
        freed = complete(server, [user(LONG)])["usage"]["kv_cache"]["blocks_freed"]
        expect(page.locator("#chat .assistant .note")).to_contain_text(f"Compression freed {freed} blocks")
        page.locator("#chat-budget").press("End")
        page.locator("#chat-budget").press("ArrowLeft")
        send(page, "sun")
        error = page.locator("#chat .assistant .error").last
        expect(error).to_contain_text("this server keeps 512 at most; ask for 512 or less.")
        page.locator("#chat-budget-reset").click()
        expect(words).to_have_text("512.0 KiB: as the server, knorm, 256 tokens per KV head")
        page.locator("#chat .assistant >> nth=1 >> text=Retry").click()
        ended(page)
        expect(error).to_have_text("The answer was cut off: max tokens is 12.")
        assert len(answers(page)) == 2
        assert answers(page)[1]
        page.context.close()


def test_conversations_stay_in_this_browser(chat: Page, tmp_path: Path) -> None:
    send(chat, "GO wind")
    first = answers(chat)
    chat.fill("#chat-system", "GO moon")
    chat.click("#chat-new")
    expect(chat.locator("#chat-message")).to_be_focused()
    expect(chat.locator("#chat-system")).to_have_value("GO moon")
    send(chat, "sun sky")
    chat.reload()
    chat.wait_for_selector("html[data-ready]")
    choice = chat.locator("#chat-choice")
    assert choice.locator("option").all_text_contents() == ["sun sky", "GO wind"]
    choice.select_option(label="GO wind")
    assert answers(chat) == first
    with chat.expect_download() as download:
        chat.click("#chat-export")
    file = tmp_path / download.value.suggested_filename
    download.value.save_as(file)
    kept = [{"role": "system", "content": "GO moon"}, user("GO wind"), assistant(first[0])]
    assert read_messages(file) == kept
    chat.once("dialog", lambda dialog: dialog.dismiss())
    chat.click("#chat-delete")
    expect(choice.locator("option")).to_have_count(2)
    chat.once("dialog", lambda dialog: dialog.accept())
    chat.click("#chat-delete")
    assert choice.locator("option").all_text_contents() == ["sun sky"]
    stored = chat.evaluate("Object.keys(localStorage).map((name) => localStorage[name]).join()")
    assert "sun sky" in stored
    assert "GO wind" not in stored


def test_a_full_storage_raises_an_alert(chat: Page) -> None:
    chat.evaluate(FULL_STORAGE)
    send(chat, "GO wind")
    expect(chat.get_by_role("alert")).to_contain_text("storage is full")
    assert answers(chat)[0]


BEGUN = 'data: {"choices": [{"index": 0, "delta": {"content": "sun"}}]}\n\n'
FAILED = 'data: {"error": {"message": "the engine failed."}}\n\n'
EVENTS = {"content_type": "text/event-stream"}
BUSY = {"error": {"message": "the queue is full; try again later."}}
FAILURES: dict[str, Callable[[Route], None]] = {
    "The connection ended before the answer did.": lambda route: route.fulfill(body=BEGUN, **EVENTS),
    "The engine failed.": lambda route: route.fulfill(body=BEGUN + FAILED, **EVENTS),
    "The queue is full; try again later.": lambda route: route.fulfill(status=429, json=BUSY),
    "The server answered 502.": lambda route: route.fulfill(status=502, body="<h1>Bad</h1>"),
    "The server does not answer; try again when it runs.": lambda route: route.abort("connectionrefused"),
}


@pytest.mark.parametrize("words", FAILURES)
def test_after_a_failure_nothing_is_lost(page_server: Running, open_page: OpenPage, words: str) -> None:
    page = greedy(open_page(page_server, refused=True))
    page.route("**/v1/chat/completions", FAILURES[words], times=1)
    send(page, "GO wind")
    expect(page.locator("#chat .assistant .error")).to_have_text(words)
    begun = "sun" if words.startswith(("The connection", "The engine")) else ""
    assert answers(page) == [begun]
    page.reload()
    page.wait_for_selector("html[data-ready]")
    expect(page.locator("#chat .assistant .error")).to_have_text(words)
    send(page, "sun")
    before = [user("GO wind"), assistant("sun"), user("sun")] if begun else [user("GO wind\n\nsun")]
    assert answers(page) == [begun, text_of(page_server, before)]
    page.locator("#chat .assistant >> nth=0 >> text=Retry").click()
    ended(page)
    right = text_of(page_server, [user("GO wind")])
    if begun:
        assert answers(page) == [right]
        page.get_by_label("Earlier version").click()
        assert answers(page) == [begun, text_of(page_server, before)]
    else:  # nothing began, so there is no earlier version
        assert answers(page) == [right, text_of(page_server, before)]


def test_reasoning_is_folded_and_goes_back(page_server: Running, open_page: OpenPage) -> None:
    deltas = [{"reasoning_content": "GO "}, {"reasoning_content": "moon"}, {"content": "sun"}]
    chunks = [f"data: {json.dumps({'choices': [{'index': 0, 'delta': delta}]})}\n\n" for delta in deltas]
    sent: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        sent.append(route.request.post_data_json)
        route.fulfill(body="".join(chunks) + "data: [DONE]\n\n", **EVENTS)

    page = open_page(page_server)
    page.route("**/v1/chat/completions", answer)
    send(page, "GO wind")
    expect(page.locator("#chat .assistant details p")).to_be_hidden()
    page.locator("#chat .assistant summary").click()
    expect(page.locator("#chat .assistant details p")).to_have_text("GO moon")
    assert answers(page) == ["sun"]
    send(page, "sky")
    answered = {**assistant("sun"), "reasoning_content": "GO moon"}
    assert sent[1]["messages"] == [user("GO wind"), answered, user("sky")]
    assert {key: sent[0][key] for key in ("temperature", "top_p", "top_k")} == {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
    }
    assert "kv_compression" not in sent[0]


def test_a_model_without_a_chat_template(open_page: OpenPage) -> None:
    llm = LLM(demo_model(), num_blocks=64)
    llm.tokenizer.chat_template = None
    with running_server(llm) as server:
        page = open_page(server, refused=True)
        send(page, "GO wind")
        expect(page.locator("#chat .assistant .error")).to_contain_text("has no chat template")
        expect(page.locator("#chat .user .text")).to_have_text("GO wind")
        page.context.close()


def test_the_browser_gives_the_key(open_page: OpenPage) -> None:
    """A 401 makes it ask for a password, which it then sends with every request of the page."""
    with running_server(LLM(demo_model(), num_blocks=64), api_keys=("secret",)) as server:
        credentials = {"username": "any", "password": "secret"}
        page = greedy(open_page(server, refused=True, http_credentials=credentials))
        send(page, "GO wind")
        assert len(answers(page)[0].split()) == 12
        page.context.close()


def test_the_keyboard_alone(page_server: Running, chat: Page) -> None:
    chat.locator("#theme").focus()
    order = []
    while not order or order[-1] != "pool":
        chat.keyboard.press("Tab")
        order.append(chat.evaluate("document.activeElement.id"))
        assert chat.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", order[-1]
        if order[-1] == "chat-message":
            chat.keyboard.type("GO")
            chat.keyboard.press("Shift+Enter")
            chat.keyboard.type("wind")
            assert answers(chat) == []
            chat.keyboard.press("Enter")
            ended(chat)
            expect(chat.locator("#chat-message")).to_be_focused()
            assert answers(chat) == [text_of(page_server, [user("GO\nwind")])]
    head = [f"chat-{name}" for name in ("choice", "new", "delete", "export")]
    fields = [f"chat-{name}" for name in ("system", "temperature", "max-tokens", "policy")]
    foot = [f"chat-{name}" for name in ("turns", "budget", "message", "send")]
    assert [name for name in order if name] == [*head, *fields, *foot, "pool"]


def test_it_fits_a_phone(page_server: Running, open_page: OpenPage) -> None:
    page = greedy(open_page(page_server, viewport={"width": 360, "height": 740}, has_touch=True))
    send(page, LONG.replace(" ", "_") + "\n" + LONG)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for name in ("choice", "export", "turns", "budget", "message", "send", "stop"):
        box = page.locator(f"#chat-{name}").bounding_box()
        assert box is not None
        assert 0 <= box["x"] <= box["x"] + box["width"] <= 360, name
    page.locator("#chat").scroll_into_view_if_needed()
    foot, panel = (page.locator(each).bounding_box() for each in ("#chat-send", "#chat"))
    assert foot is not None
    assert panel is not None
    assert panel["height"] < 740  # what is typed and what is read are on one screen
