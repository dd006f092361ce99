"""`kvreclaim serve` with host and disk below its pool: what ends gracefully is found again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import web
from serve_command import served
from steering import LIMIT_S

MODEL = "kvreclaim-demo"
PROMPT = " ".join(f"k{i % 9 + 1} v{i % 7 + 1}" for i in range(100))
ASKED = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True}


def options(tmp_path: Path) -> list[str]:
    size = ["--kv-offloading-size", "0.02", "--kv-offloading-disk-size", "0.02"]
    where = ["--kv-offloading-disk-path", str(tmp_path / "blocks")]
    return [*size, *where, "--kv-load-policy", "wait_complete"]


@pytest.mark.parametrize("engine", ["--engine-process", "--no-engine-process"])
def test_a_second_server_finds_what_the_first_one_computed(engine: str, tmp_path: Path) -> None:
    """SIGTERM comes right behind the answer, while its blocks are on their way to disk."""
    answers = []
    for _ in range(2):
        with served(tmp_path, *options(tmp_path), engine) as server:
            answers.append(web.post(f"{server.base_url}/v1/completions", json=ASKED).json())
            server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(LIMIT_S) == 0, server.log.read_text()
    first, second = answers
    assert first["choices"][0]["text"] == second["choices"][0]["text"]
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    num_prompt = second["usage"]["prompt_tokens"]
    assert num_prompt > 64
    full = (num_prompt - 1) // 16 * 16
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == full
