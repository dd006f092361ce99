"""Headless Chromium: the system's, so nothing is installed to run the tests of the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

LIMIT_MS = 300_000
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """For one module: while Playwright runs, its event loop is this thread's, and asyncio.run is refused."""
    if CHROMIUM is None and os.environ.get("CI"):
        pytest.fail("CI has no browser; .ci/run installs one")
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome: the page is not tested in a browser")
    expect.set_options(timeout=LIMIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
