"""The page in headless Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import numpy as np
import web
from playwright.sync_api import Page, expect
from running import MODEL, Running, running_server
from steering import halted, paused, until

from kvreclaim import LLM, demo_model
from kvreclaim.page.frames import Snapshot, frame_event
from kvreclaim.page.sharing import Sharing
from kvreclaim.page.view import FREE, IN_USE, PoolView, RequestView

OpenPage = Callable[..., Page]

EXAMPLE = json.loads((files("kvreclaim.server.page") / "examples.json").read_bytes())["demo"][1]
COMPRESSION = {"policy": "query_mixture", "budget": 256, "recent": 64, "interval": 64}

ERROR = 'data: {"error": {"message": "it failed."}}\n\n'
READ = """
  const c = document.querySelector('#pool');
  const copy = new OffscreenCanvas(c.width, c.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(c, 0, 0);
  const data = copy.getImageData(0, 0, c.width, c.height).data;
"""
PIXELS = f"() => {{ {READ} return data.reduce((hash, value) => (hash * 31 + value) | 0, 7); }}"
HAS_COLOUR = (
    f"(wanted) => {{ {READ}"
    + """
  for (let i = 0; i < data.length; i += 4)
    if (data[i] === wanted[0] && data[i + 1] === wanted[1] && data[i + 2] === wanted[2]) return true;
  return false; }"""
)


def complete(server: Running, **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": EXAMPLE["prompt"], "temperature": 0, **fields}
    answer: dict[str, Any] = web.post(f"{server.base_url}/v1/completions", json=body).json()
    return answer


@contextmanager
def running_request(server: Running, **fields: Any) -> Iterator[None]:
    """A long answer that is being written, aborted at the end."""
    body = {
        "model": MODEL,
        "prompt": " ".join(EXAMPLE["prompt"].split()[:1000]),
        "max_tokens": 3000,
        "ignore_eos": True,
        "stream": True,
    }
    url = f"{server.base_url}/v1/completions"
    with web.stream("POST", url, json={**body, **fields}) as answer:
        lines = answer.iter_lines()  # kept: a generator that is collected closes its connection
        next(lines)
        yield
        lines.close()


def in_use(page: Page) -> int:
    return int(page.locator("[data-chart=blocks] [data-value]").inner_text().split()[0].replace(",", ""))


def fill_form(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        page.fill(f"#{name.replace('_', '-')}", value)


def test_both_answers_stream_and_equal_those_of_the_api(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    page.click("#example")
    expect(page.locator("#example-note")).to_contain_text("Example")
    page.click("#example")
    expect(page.locator("#prompt")).to_have_value(EXAMPLE["prompt"])
    with halted(page_server, num_requests=2) as wait:
        page.click("#send")
        wait()
        for pane in ("compressed", "full"):
            expect(page.locator(f"#{pane} [data-answer]")).not_to_be_empty()
            expect(page.locator(f"#{pane} [data-state]")).to_contain_text("runs")
    for pane, compression in (("compressed", COMPRESSION), ("full", {"policy": "full"})):
        part = page.locator(f"#{pane}")
        expect(part.locator("[data-state]")).to_have_text("finished (stop)")
        right = complete(page_server, max_tokens=EXAMPLE["max_tokens"], kv_compression=compression)
        assert part.locator("[data-answer]").text_content() == right["choices"][0]["text"]
        usage = right["usage"]
        words = len(EXAMPLE["answer"].split())
        assert part.locator("[data-tokens]").inner_text() == str(usage["completion_tokens"])
        assert part.locator("[data-peak]").inner_text() == str(usage["kv_cache"]["peak_blocks"])
        assert part.locator("[data-final]").inner_text() == str(usage["kv_cache"]["final_blocks"])
        assert part.locator("[data-freed]").inner_text() == str(usage["kv_cache"]["blocks_freed"])
        assert part.locator("[data-right]").inner_text() == f"{words} of {words}"
    expect(page.locator("#answer-news")).to_contain_text(f"{usage['completion_tokens']} tokens")


def test_the_pool_changes_while_a_request_runs(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    idle, pixels = in_use(page), page.evaluate(PIXELS)
    assert idle == 0
    expect(page.locator("#requests-empty")).to_be_visible()
    row = page.locator("#requests tbody tr")
    with halted(page_server), running_request(page_server):
        expect(row).to_have_count(1)
        until(lambda: page.evaluate(PIXELS) != pixels)
        until(lambda: in_use(page) > 60)
        logical, physical, blocks, evicted, freed = row.locator("td.number").all_inner_texts()
        assert logical == physical
        assert (evicted, freed) == ("0", "0")
        assert in_use(page) == int(blocks)
        assert "in use by 1 request, " in (page.locator("#pool-summary").text_content() or "")
    expect(row).to_have_count(0)
    expect(page.locator("[data-chart=blocks] [data-value]")).to_have_text("0 of 1,024")


def test_who_shares_what_is_drawn(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    panel, rows = page.locator("#sharing"), page.locator("#sharing .tree li")
    expect(panel).to_be_hidden()
    with halted(page_server), running_request(page_server):
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        expect(panel).to_be_hidden()  # it shares nothing with itself
        with running_request(page_server):
            expect(panel).to_be_visible()
            expect(rows.first).to_contain_text("shared by 2 sequences")
            expect(rows.first).to_have_attribute("aria-level", "1")
            expect(rows.first.locator(".holders .swatch")).to_have_count(2)
            titles = rows.first.locator(".holders .swatch").evaluate_all("all => all.map((e) => e.title)")
            ids = page.locator("#requests .who").evaluate_all("all => all.map((e) => e.title.split(':')[0])")
            assert titles == ids
            expect(page.locator("#sharing-note")).to_contain_text("blocks spared")
    expect(panel).to_be_hidden()


def test_the_moment_of_compaction_shows(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server, reduced_motion="reduce")
    expect(page.locator("#passes-empty")).to_be_visible()
    freed = page.evaluate("getComputedStyle(document.querySelector('.swatch.freed')).backgroundColor")
    colour = [int(number) for number in freed[4:-1].split(",")]
    assert not page.evaluate(HAS_COLOUR, colour)
    before_the_end = halted(page_server, num_tokens=2900)
    with before_the_end, running_request(page_server, kv_compression=COMPRESSION):
        until(lambda: page.evaluate(HAS_COLOUR, colour))
        expect(page.locator("#passes li").first).to_contain_text("tokens evicted")
        row = page.locator("#requests tbody tr td.number")
        expect(row).to_have_count(5)
        with paused(page_server):
            logical, physical, _, evicted, freed = (int(n.replace(",", "")) for n in row.all_inner_texts())
            assert logical - physical == evicted > 0
            assert freed > 0
            page.locator("#requests .who").click()  # its blocks stay, others fade
            expect(page.locator("#requests .who")).to_have_attribute("aria-pressed", "true")
    until(lambda: not page.evaluate(HAS_COLOUR, colour))  # the flash ends


def test_stop_ends_a_request_and_returns_its_blocks(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    fill_form(page, prompt="GO wind", max_tokens="4000", temperature="0")
    with halted(page_server, num_requests=2):
        page.click("#send")
        for pane in ("compressed", "full"):
            expect(page.locator(f"#{pane} [data-state]")).to_contain_text("runs")
        for pane in ("compressed", "full"):
            page.locator(f"#{pane} [data-stop]").click()
            expect(page.locator(f"#{pane} [data-state]")).to_have_text("stopped")
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("[data-chart=blocks] [data-value]")).to_have_text("0 of 1,024")


def test_the_servers_error_message_is_shown(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    answer = {"content_type": "text/event-stream", "body": ERROR}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(**answer))
    fill_form(page, prompt="sun")
    page.click("#send")
    for pane in ("compressed", "full"):
        expect(page.locator(f"#{pane} [data-state]")).to_have_text("it failed.")


def test_keyboard_alone(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server)
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the chat")).to_be_focused()
    order = []
    for _ in range(40):
        page.keyboard.press("Tab")
        order.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none", order[-1]
        if order[-1] == "pool":
            expect(page.locator("#readout")).to_contain_text("Block 0: ")
            page.keyboard.press("ArrowRight")
            expect(page.locator("#readout")).to_contain_text("Block 1: ")
            page.keyboard.press("End")
            shown = re.findall("[0-9,]+(?= of| blocks)", page.locator("#pool-scale").inner_text())[0]
            expect(page.locator("#readout")).to_contain_text(f"Block {int(shown.replace(',', '')) - 1:,}: ")
        if order[-1] == "prompt":
            page.keyboard.type("sun moon")
        if order[-1] == "max-tokens":
            page.keyboard.type("3")
        if order[-1] == "send":
            page.keyboard.press("Enter")
            break
    fields = ["prompt", "policy", "budget", "recent", "interval", "max-tokens", "temperature"]
    stops = ["theme", "pool", *fields, "send"]
    assert [name for name in order if name in stops] == stops
    expect(page.locator("#full [data-tokens]")).to_have_text("3")


def test_only_the_used_part_of_a_large_pool_is_drawn(open_page: OpenPage) -> None:
    with running_server(LLM(demo_model(), num_blocks=100_000, block_size=2)) as server:
        page = open_page(server)
        scale = page.locator("#pool-scale")
        expect(scale).to_have_text("the first 256 of 100,000 blocks (the others are free), one per cell")
        expect(page.locator("#block-size")).to_have_text("2")
        pixels = page.evaluate(PIXELS)
        compression = {**COMPRESSION, "interval": 16}
        with halted(server, num_tokens=100), running_request(server, kv_compression=compression):
            expect(page.locator("#passes li").first).to_contain_text("tokens evicted")
            until(lambda: page.evaluate(PIXELS) != pixels)
            expect(scale).to_contain_text("the first 1,024 of 100,000 blocks")
            page.locator("#pool").focus()
            expect(page.locator("#readout")).to_contain_text("Block 0: ")
        expect(page.locator("[data-chart=blocks] [data-value]")).to_have_text("0 of 100,000")
        page.context.close()


def test_a_hundred_thousand_blocks(page_server: Running, open_page: OpenPage) -> None:
    """A pool that is nearly full, from a feed of its own."""
    state = np.full(100_000, IN_USE, np.uint8)
    state[99_996:] = FREE
    owner = np.where(state == IN_USE, 0, -1).astype(np.int32)
    request = RequestView("r", 1, 10, 10, 99_996, 0, 0)
    names = "prompt_tokens generation_tokens tokens_evicted compactions prefix_query_tokens prefix_hit_tokens"
    totals = dict.fromkeys([*names.split(), "blocks_freed"], 0)
    view, sharing = PoolView(state, owner, (request,)), Sharing((), 0)
    _, frame = frame_event(Snapshot(0.0, view, sharing, 1, 0, totals, None, []))

    def fed(page: Page) -> None:
        page.route("**/page/feed", lambda route: route.fulfill(content_type="text/event-stream", body=frame))

    page = open_page(page_server, before=fed)
    expect(page.locator("#pool-scale")).to_contain_text("100,000 blocks, 13 per cell")
    page.locator("#pool").focus()
    expect(page.locator("#readout")).to_have_text("Blocks 0 to 12: 13 in use, most of them by r.")
    page.keyboard.press("End")
    expect(page.locator("#readout")).to_have_text("Blocks 99,996 to 99,999: 4 free.")


def test_a_prompt_goes_through_the_chat_template(open_page: OpenPage) -> None:
    """And an example is offered only if the model solves it with its full cache."""
    template = "{% for m in messages %}GO {{ m.content }}{% endfor %}"
    with running_server(LLM(demo_model(), num_blocks=1024), chat_template=template) as server:

        def answered(content: str, **fields: Any) -> str:
            body = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0}
            answer = web.post(f"{server.base_url}/v1/chat/completions", json=body | fields).json()
            return str(answer["choices"][0]["message"]["content"])

        page = open_page(server)
        fill_form(page, prompt="wind", max_tokens="8")
        page.click("#send")
        expect(page.locator("#full [data-state]")).to_contain_text("finished")
        right = answered("wind", max_tokens=8)
        assert page.locator("#full [data-answer]").text_content() == right
        common = {"max_tokens": 8, "budget": 128}
        examples = [
            {"title": "unsolved", "prompt": "sun", "contains": "no such word", **common},
            {"title": "solved", "prompt": "wind", "contains": right.split()[-1], **common},
        ]
        page.route("**/page/examples", lambda route: route.fulfill(json=examples))
        page.click("#example")
        expect(page.locator("#example-note")).to_have_text("Example: solved")
        expect(page.locator("#prompt")).to_have_value("wind")
        page.click("#send")
        expect(page.locator("#full [data-right]")).to_have_text(
            f"{len(right.split())} of {len(right.split())}"
        )
        examples.pop()
        page.reload()
        expect(page.locator("#model")).not_to_be_empty()  # the settings are there
        page.click("#example")
        expect(page.locator("#example-note")).to_contain_text("solves none of them")
        page.context.close()


def test_what_was_freed_is_in_sight_on_a_phone(page_server: Running, open_page: OpenPage) -> None:
    page = open_page(page_server, viewport={"width": 390, "height": 844})
    with halted(page_server, num_tokens=100), running_request(page_server, kv_compression=COMPRESSION):
        expect(page.locator("#requests tbody tr")).to_have_count(1)
        parts = ["#requests th >> text=Freed", "#requests tbody td >> nth=-1", "#full [data-freed]"]
        for part in [*parts, "[data-chart=freed] [data-value]"]:
            box = page.locator(part).bounding_box()
            assert box is not None, part
            assert 0 <= box["x"] <= box["x"] + box["width"] <= 390, part
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
