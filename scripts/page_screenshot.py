"""Draw docs/page.png or, with --vllm, docs/vllm_page.png: the live page while several requests run.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/page_screenshot.py [--vllm] [--theme dark] [--out FILE]

Serves the language model of `make real-model` on a free port; with --vllm in vLLM's environment (`make
vllm-env`). Opens the page in the Chromium that is on the path; our own page shows a chat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from kvreclaim import LLM, real_model
from kvreclaim.bench.systems.server_process import NAME, VllmServer
from kvreclaim.bench.systems.worker_process import link_model
from kvreclaim.engine.serving.client import AsyncEngine
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.entry.run import Server
from kvreclaim.server.http.listener import bind
from kvreclaim.server.shared.service import Service

MODEL = "SmolLM2-135M-Instruct"
DOCS = Path(__file__).parents[1] / "docs"
NUM_BLOCKS, NUM_CLIENTS = 1024, {False: 3, True: 7}
SECONDS, HEIGHT = {False: 8, True: 40}, {False: 900, True: 860}
"""Before the picture, and of it; by whether vLLM serves."""
COMPRESSED = {"policy": "query_mixture", "budget": 512, "recent": 64, "interval": 256}
QUESTION = "Explain how a hash table works, with a list of its operations and an example in Python."
WORDS = ("how", "many", "blocks", "stay", "and", "which", "tokens", "of", "its", "own", "heads", "go")
Body = dict[str, Any]


def our_body(rng: random.Random, client: int) -> Body:
    """One client keeps its whole cache, one draws two answers to a prompt, one pins its prompt."""
    return {
        "model": MODEL,
        "prompt": " ".join(rng.choices(WORDS, k=rng.randrange(300, 900))),
        "max_tokens": rng.randrange(300, 1400),
        "temperature": 0.8,
        "ignore_eos": True,
        "n": 2 if client == 1 else 1,
        "kv_compression": {"policy": "full"} if client == 0 else COMPRESSED,
        **({"prompt_cache_retention": "24h"} if client == 2 else {}),
    }


def vllm_body(rng: random.Random, client: int) -> Body:
    common = " ".join(random.Random(0).choices(WORDS, k=200))
    return {
        "model": NAME,
        "prompt": f"{common} {' '.join(rng.choices(WORDS, k=rng.randrange(100, 300)))}",
        "max_tokens": rng.randrange(200, 900),
        "ignore_eos": True,
        "vllm_xargs": {"kv_compression": "off" if client == 0 else "on"},
    }


@contextmanager
def our_server(model: Path, tiers: Path | None) -> Iterator[tuple[str, str]]:
    """Serve the model. Returns: addresses of the server and of the page."""
    sizes = {"kv_offloading_size": 2**-4, "kv_offloading_disk_size": 2**-3}
    options = {} if tiers is None else {"kv_offloading_disk_path": str(tiers), **sizes}
    listener, started, box = bind("127.0.0.1", 0), threading.Event(), {}

    async def main() -> None:
        llm = LLM(model, num_blocks=NUM_BLOCKS, **options)
        box["server"] = Server(Service(AsyncEngine(llm), ServerConfig(served_model_name=(MODEL,))))
        task = asyncio.ensure_future(box["server"].serve(sockets=[listener]))
        while not box["server"].started and not task.done():
            await asyncio.sleep(0.05)
        started.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    started.wait()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    try:
        yield url, url
    finally:
        box["server"].should_exit = True
        thread.join()


@contextmanager
def vllm_server(python: Path, model: Path) -> Iterator[tuple[str, str]]:
    """Serve the model in vLLM with the plugin. Returns: addresses of the server and of the page."""
    settings = {"policy": "knorm", "budget": 384, "interval": 128, "page_port": 0}
    options = {
        "dtype": "bfloat16",
        "block-size": 32,
        "num-gpu-blocks-override": 241,
        "max-model-len": 4096,
        "max-num-batched-tokens": 512,
        "additional-config": json.dumps({"kv_compression": settings}),
    }
    with tempfile.TemporaryDirectory() as folder:
        link_model(model, linked := Path(folder, "model"))
        with closing(VllmServer(python, 1, 2**30, linked, options, plugin=True)) as server:
            server.wait()
            [page] = re.findall(r"the block pool is shown at (http://\S+)", server.log.read_text())
            yield server.url, page


@contextmanager
def clients(url: str, count: int, make: Callable[[random.Random, int], Body]) -> Iterator[None]:
    """Run clients that send one request after another during the block."""
    stop = threading.Event()

    def run(client: int) -> None:
        rng = random.Random(client)
        while not stop.is_set():
            headers = {"content-type": "application/json"}
            body = json.dumps(make(rng, client)).encode()
            urllib.request.urlopen(urllib.request.Request(f"{url}/v1/completions", body, headers)).read()

    threads = [threading.Thread(target=run, args=(client,)) for client in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def wait_until(page: Page, condition: Callable[[], bool]) -> None:
    """Wait without Playwright's own means, which evaluate text in the page; its policy forbids that."""
    while not condition():
        page.wait_for_timeout(20)


def shoot(url: str, theme: str, out: Path, *, is_vllm: bool) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": HEIGHT[is_vllm]}, color_scheme=theme)
        page.goto(url)
        page.wait_for_timeout(SECONDS[is_vllm] * 1000)
        if not is_vllm:
            page.press("#chat-budget", "Home")
            page.fill("#chat-message", QUESTION)
            page.press("#chat-message", "Enter")
            figures = page.locator("#chat .assistant .note")
            wait_until(page, lambda: "Compression freed" in figures.inner_text())
        seen = page.locator("#passes").inner_text()
        wait_until(page, lambda: page.locator("#passes").inner_text() != seen)
        page.screenshot(path=out)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiers", type=Path, help="directory of a disk tier, under 64 MiB of host memory")
    parser.add_argument("--vllm-python", type=Path, default=Path(".vllm-env/bin/python"))
    parser.add_argument("--model", type=Path, default=real_model(), help="what is served")
    given = parser.parse_args()
    if given.model is None:
        parser.error("no language model is here; run `make real-model`, or pass --model")
    out = given.out or DOCS / ("vllm_page.png" if given.vllm else "page.png")
    server = (
        vllm_server(given.vllm_python, given.model) if given.vllm else our_server(given.model, given.tiers)
    )
    body = vllm_body if given.vllm else our_body
    with server as (url, page), clients(url, NUM_CLIENTS[given.vllm], body):
        shoot(page, given.theme, out, is_vllm=given.vllm)
    print(f"{out}: {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
