"""A chat without special fields runs no file of a feature, from the gate to the answer."""

from __future__ import annotations

import web
from entered import off, traced
from running import MODEL, running_server

MOST_FILES = 65
"""Files that it runs through, in the event loop, the workers' threads and the engine's."""


def test_a_plain_chat_runs_no_file_of_a_feature() -> None:
    with traced() as tracer, running_server() as server:

        def ask(text: str) -> None:
            body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4}
            assert web.post(f"{server.base_url}/v1/chat/completions", json=body).status_code == 200

        ask("hello")
        with tracer.recording() as files:
            ask("what is new")
    assert {
        "server/http/gate.py",
        "server/openai/chat.py",
        "engine/api/chat.py",
        "engine/step/engine.py",
    } <= files
    assert off(files) == []
    assert len(files) <= MOST_FILES, sorted(files)
