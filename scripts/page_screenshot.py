"""Draw docs/page.png: the page while several requests run, most of them compressed.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/page_screenshot.py [--theme dark] [--out FILE]

Serves the demo model on a free port and opens it in the Chromium that is on the path.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import threading
import urllib.request
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from kvreclaim import LLM, demo_model
from kvreclaim.engine.serving.thread import AsyncEngine
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.entry.run import Server
from kvreclaim.server.http.listener import bind
from kvreclaim.server.shared.service import Service

TARGET = Path(__file__).parents[1] / "docs" / "page.png"
MODEL = "kvreclaim-demo"
NUM_BLOCKS, NUM_CLIENTS, SECONDS = 1024, 6, 15
VIEWPORT = {"width": 1280, "height": 1500}
COMPRESSED = {"policy": "query_mixture", "budget": 512, "recent": 64, "interval": 256}
EXAMPLES = json.loads((files("kvreclaim.server.page") / "examples.json").read_bytes())["demo"]


def ask(base_url: str, client: int, stop: threading.Event) -> None:
    """One client: a prompt after the other; some share their beginning, one keeps its whole cache."""
    rng = random.Random(client)
    while not stop.is_set():
        words = EXAMPLES[client % len(EXAMPLES)]["prompt"].split()
        body = {
            "model": MODEL,
            "prompt": " ".join(words[: rng.randrange(400, 1200)]),
            "max_tokens": rng.randrange(300, 1400),
            "temperature": 0.8,
            "ignore_eos": True,
            "n": 2 if client == 1 else 1,
            "kv_compression": {"policy": "full"} if client == 0 else COMPRESSED,
        }
        if client == 2:
            body["prompt_cache_retention"] = "24h"
        headers = {"content-type": "application/json"}
        url = f"{base_url}/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        urllib.request.urlopen(request).read()


def serve(box: dict[str, Any], started: threading.Event) -> None:
    async def main() -> None:
        listener = bind("127.0.0.1", 0)
        llm = LLM(demo_model(), num_blocks=NUM_BLOCKS, **box["tiers"])
        server = Server(Service(AsyncEngine(llm), ServerConfig(served_model_name=(MODEL,))))
        box.update(url=f"http://127.0.0.1:{listener.getsockname()[1]}", server=server)
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.05)
        started.set()
        await task

    asyncio.run(main())


def wait_until(page: Page, condition: Callable[[], bool]) -> None:
    """Playwright's own waiting evaluates text in the page, which its policy forbids."""
    while not condition():
        page.wait_for_timeout(20)


def shoot(base_url: str, theme: str, out: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=VIEWPORT, color_scheme=theme)
        page.goto(base_url)
        page.click("#example")
        wait_until(page, lambda: page.input_value("#prompt") != "")
        page.wait_for_timeout(SECONDS * 1000)
        page.click("#send")
        tokens = page.locator("#compressed [data-tokens]")
        wait_until(page, lambda: tokens.inner_text().isdigit() and int(tokens.inner_text()) > 120)
        page.evaluate("document.activeElement.blur()")
        seen = page.locator("#passes").inner_text()
        wait_until(page, lambda: page.locator("#passes").inner_text() != seen)
        page.screenshot(path=out)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--out", type=Path, default=TARGET)
    parser.add_argument("--tiers", type=Path, help="Directory of a disk tier, under 64 MiB of host memory.")
    given = parser.parse_args()
    box: dict[str, Any] = {"tiers": {}}
    if given.tiers is not None:
        sizes = {"kv_offloading_size": 2**-4, "kv_offloading_disk_size": 2**-3}
        box["tiers"] = {"kv_offloading_disk_path": str(given.tiers), **sizes}
    started, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=serve, args=(box, started))
    thread.start()
    started.wait()
    clients = [threading.Thread(target=ask, args=(box["url"], i, stop)) for i in range(NUM_CLIENTS)]
    for client in clients:
        client.start()
    try:
        shoot(box["url"], given.theme, given.out)
    finally:
        stop.set()
        for client in clients:
            client.join()
        box["server"].should_exit = True
        thread.join()
    print(f"{given.out}: {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
