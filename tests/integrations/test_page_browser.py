"""The page inside vLLM in a browser: blocks, requests and compactions come, and there is nothing to send."""

from __future__ import annotations

import threading

from chromium import browser as browser
from playwright.sync_api import Browser, Page, expect
from toy_page import ToyPool, serving, shrunk


def opened(browser: Browser, url: str, complaints: list[str]) -> Page:
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto(url)
    page.wait_for_selector("html[data-ready]")
    return page


def test_the_pool_is_drawn_and_nothing_can_be_sent(browser: Browser) -> None:
    pool, complaints = ToyPool(40), list[str]()
    with serving(pool) as server:
        page = opened(browser, server.url, complaints)
        in_use = page.locator("[data-chart=blocks] [data-value]")
        expect(in_use).to_have_text("0 of 40")
        expect(page.locator("#model")).to_have_text("toy")
        expect(page.locator("#requests-empty")).to_have_text("No request runs.")
        assert page.locator("form, textarea, #compare, footer").count() == 0
        stop, shrink = threading.Event(), threading.Event()
        pool.idle, pool.tables = False, {"r1": [1, 2, 3, 4], "r2": [9]}

        def schedule() -> None:
            while not stop.wait(0.01):
                server.recorder.begin_step()
                if shrink.is_set() and len(pool.tables["r1"]) == 4:
                    pool.tables = {**pool.tables, "r1": [1, 2]}
                    pool.totals = {**pool.totals, "blocks_freed": 2, "tokens_evicted": 64, "compactions": 1}
                    server.recorder.passed([shrunk("r1", [1, 2, 3, 4], [1, 2], evicted=64)])
                server.recorder.end_step()

        thread = threading.Thread(target=schedule)
        thread.start()
        try:
            rows = page.locator("#requests tbody tr")
            expect(rows).to_have_count(2)
            expect(in_use).to_have_text("5 of 40")
            assert rows.first.locator("td.number").nth(2).inner_text() == "4"
            expect(page.locator("#passes-empty")).to_be_visible()
            shrink.set()
            expect(page.locator("#passes li")).to_have_count(1)
            expect(page.locator("#passes li")).to_contain_text("4 → 2 blocks, 64 tokens evicted")
            expect(in_use).to_have_text("3 of 40")
            expect(page.locator("[data-chart=freed] [data-value]")).to_have_text("2 since the start")
            page.locator("#pool").focus()
            page.keyboard.press("Home")
            expect(page.locator("#readout")).to_have_text("Block 1: in use by r1.")  # as vLLM numbers them
            page.keyboard.press("End")
            expect(page.locator("#readout")).to_have_text("Block 40: free.")
        finally:
            stop.set()
            thread.join()
        server.close()
        expect(page.locator("#link-text")).to_have_text("the server is shutting down")
        page.close()
    assert complaints == []
