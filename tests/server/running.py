"""A server in a thread of the test process, on a free port."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import openai
from fastapi import FastAPI
from web import LIMIT_S

from kvreclaim import LLM, demo_model
from kvreclaim.engine.serving.client import AsyncEngine
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.entry.run import Server
from kvreclaim.server.http.connections import Connections
from kvreclaim.server.http.listener import bind
from kvreclaim.server.shared.service import Service

MODEL = "kvreclaim-demo"


@dataclass(frozen=True)
class Running:
    """base_url without /v1; service and app belong to the server's own event loop."""

    base_url: str
    service: Service
    app: FastAPI
    loop: asyncio.AbstractEventLoop
    listener: socket.socket
    connections: Connections

    @property
    def llm(self) -> LLM:
        return self.service.engine.llm


def openai_client(server: Running, *, api_key: str = "any") -> openai.OpenAI:
    """OpenAI's own client, which raises at the first refusal; close it."""
    return openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=api_key, max_retries=0)


@contextmanager
def running_server(
    llm: LLM | None = None, *, keep_alive_s: int = LIMIT_S, **config: Any
) -> Iterator[Running]:
    """Serve until the block ends. config: of ServerConfig.

    keep_alive_s: so long that the server does not close a connection that a client is about to use again
    """
    llm = llm if llm is not None else LLM(demo_model(), num_blocks=2048, max_num_seqs=64)
    listener = bind("127.0.0.1", 0)
    own = {"served_model_name": (MODEL,), "keep_alive_timeout_s": keep_alive_s}
    settings = ServerConfig(**{**own, **config})
    started, box = threading.Event(), {}

    async def main() -> None:
        service = Service(AsyncEngine(llm), settings)
        server = Server(service)
        box.update(service=service, server=server, loop=asyncio.get_running_loop())
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        started.set()
        await task

    thread = threading.Thread(target=asyncio.run, args=(main(),), name="server")
    thread.start()
    started.wait()
    try:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = box["server"].config
        yield Running(address, box["service"], config.app, box["loop"], listener, config.shared)
    finally:
        box["server"].config.timeout_graceful_shutdown = 5  # for connections that a failed test has left open
        box["server"].should_exit = True
        thread.join()
