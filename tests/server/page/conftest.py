"""The page in headless Chromium."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlparse

import pytest
from chromium import browser as browser
from playwright.sync_api import Browser, Page
from running import Running, running_server
from web import LIMIT_S

from kvreclaim import LLM, demo_model

TIMEOUT_MS = 1000 * LIMIT_S
OpenPage = Callable[..., Page]


@pytest.fixture(scope="module")
def page_server() -> Iterator[Running]:
    """Blocks that a test sees in use are its own."""
    with running_server(LLM(demo_model(), num_blocks=1024)) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens the page of a server. At the end: no complaint in the console, no request to another host.

    options: of Browser.new_context; ready=False: do not wait for the first frame; before: gets the page
    before it loads; refused: the browser's own lines about answers that are errors are none
    """
    contexts, complaints, requests = [], [], []

    def opened(
        server: Running,
        *,
        ready: bool = True,
        before: Callable[[Page], None] | None = None,
        refused: bool = False,
        **options: Any,
    ) -> Page:
        def note(text: str) -> None:
            if not (refused and text.startswith("Failed to load resource")):
                complaints.append(text)

        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("console", lambda message: note(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append((request.url, server.base_url)))
        if before is not None:
            before(page)
        page.goto(server.base_url)
        if ready:
            page.wait_for_selector("html[data-ready]")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert complaints == []
    assert requests
    assert [url for url, base in requests if urlparse(url).netloc != urlparse(base).netloc] == []
