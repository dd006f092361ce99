"""Draw docs/vllm_page.png: the page of `vllm serve` with the plugin while several requests run.

    .venv/bin/python scripts/vllm_page_screenshot.py [--model DIR] [--theme dark] [--out FILE]

Serves the language model of `make real-model`, or a model directory, in vLLM's environment (`make vllm-env`),
and opens the page in the Chromium that is on the path.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
import tempfile
import threading
import urllib.request
from contextlib import closing
from pathlib import Path

from playwright.sync_api import sync_playwright

from kvreclaim import real_model
from kvreclaim.bench.systems.vllm_server import NAME, VllmServer
from kvreclaim.model_paths import STATS_FILE

TARGET = Path(__file__).parents[1] / "docs" / "vllm_page.png"
CLIENTS, SECONDS = 7, 40
VIEWPORT = {"width": 1280, "height": 860}
WORDS = ("how", "many", "blocks", "stay", "and", "which", "tokens", "of", "its", "own", "heads", "go")


def serve(python: Path, model: Path) -> VllmServer:
    asked = {"policy": "knorm", "budget": 384, "interval": 128, "page_port": 0}
    options = {
        "dtype": "bfloat16",
        "block-size": 32,
        "num-gpu-blocks-override": 241,
        "max-model-len": 4096,
        "max-num-batched-tokens": 512,
        "additional-config": json.dumps({"kv_compression": asked}),
    }
    return VllmServer(python, 1, 2**30, model, options, plugin=True)


def ask(url: str, client: int, stop: threading.Event) -> None:
    """One client: a prompt after the other; some begin alike, one keeps its whole cache."""
    rng = random.Random(client)
    common = " ".join(random.Random(0).choices(WORDS, k=200))
    while not stop.is_set():
        prompt = f"{common} {' '.join(rng.choices(WORDS, k=rng.randrange(100, 300)))}"
        body = {
            "model": NAME,
            "prompt": prompt,
            "max_tokens": rng.randrange(200, 900),
            "ignore_eos": True,
            "vllm_xargs": {"kv_compression": "off" if client == 0 else "on"},
        }
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        urllib.request.urlopen(request).read()


def shoot(url: str, theme: str, out: Path) -> None:
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport=VIEWPORT, color_scheme=theme)
        page.goto(url)
        page.wait_for_timeout(SECONDS * 1000)
        seen = page.locator("#passes").inner_text()
        while page.locator("#passes").inner_text() == seen:
            page.wait_for_timeout(20)
        page.screenshot(path=out)
        browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", type=Path, default=Path(".vllm-env/bin/python"))
    parser.add_argument("--model", type=Path, default=real_model())
    parser.add_argument("--theme", choices=("light", "dark"), default="light")
    parser.add_argument("--out", type=Path, default=TARGET)
    given = parser.parse_args()
    if given.model is None:
        parser.error("no language model is here; run `make real-model`, or pass --model")
    with tempfile.TemporaryDirectory() as folder:
        for file in given.model.iterdir():
            if file.name != STATS_FILE and file.suffix != ".gguf":  # vLLM would read them as weights
                Path(folder, file.name).symlink_to(file.resolve())
        with closing(serve(given.python, Path(folder))) as server:
            server.wait()
            [url] = re.findall(r"the block pool is shown at (http://\S+)", server.log.read_text())
            stop = threading.Event()
            clients = [threading.Thread(target=ask, args=(server.url, n, stop)) for n in range(CLIENTS)]
            for client in clients:
                client.start()
            try:
                shoot(url, given.theme, given.out)
            finally:
                stop.set()
                for client in clients:
                    client.join()
    print(f"{given.out}: {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
