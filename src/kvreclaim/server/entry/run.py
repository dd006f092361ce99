"""The FastAPI app with every route, and uvicorn's event loop, with the engine in another process or in
another thread."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI

from kvreclaim import __version__
from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.server.admin import system
from kvreclaim.server.admin.logs import log_loop_error
from kvreclaim.server.admin.system import observe, stop_observing
from kvreclaim.server.anthropic import routes as anthropic
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import install_handlers
from kvreclaim.server.http.connections import HTTPConfig, Refusals, allow_files
from kvreclaim.server.http.draining import LAST_BYTES_S, DrainingServer
from kvreclaim.server.http.gate import guard
from kvreclaim.server.http.listener import address_of
from kvreclaim.server.openai import chat, completions, llamacpp, models, tokenizing
from kvreclaim.server.page.routes import install_page
from kvreclaim.server.responses import routes as responses
from kvreclaim.server.responses.background import BackgroundResponses
from kvreclaim.server.responses.store import ResponseStore
from kvreclaim.server.shared.bodies import body_limit
from kvreclaim.server.shared.service import Service

logger = logging.getLogger(__name__)


class App(FastAPI):
    """App without FastAPI's documented 422: an invalid body is a 400 in both dialects."""

    def openapi(self) -> dict[str, Any]:
        described = super().openapi()
        for path in described["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            described["components"]["schemas"].pop(unused, None)
        return described


def create_app(service: Service) -> FastAPI:
    """Build the routes over one service. The engine's thread starts and stops with the app."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        try:
            await app.state.metrics.begin(service.engine)
            yield
        finally:
            service.workers.close()
            await service.engine.stop()
            app.state.responses.close()
            await stop_observing(app)

    app = App(
        title="kvreclaim",
        version=__version__,
        description="LLM serving from a paged KV cache that is compressed while it runs.",
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,  # loads scripts from other hosts
        swagger_ui_oauth2_redirect_url=None,
        redirect_slashes=False,  # a redirect would use the host named by the request
    )
    app.state.service = service
    app.state.responses = ResponseStore(service.config)
    app.state.background = BackgroundResponses(service.config.max_stored_responses_bytes)
    install_handlers(app)
    app.include_router(system.router)
    for room in (completions, chat, responses, models, tokenizing, llamacpp):
        app.include_router(room.router)
    app.include_router(anthropic.router)
    install_page(app, service)
    guard(app, service.config, body_limit(service.config.max_body_bytes, service.longest))
    observe(app, service)
    return app


def serve(engine: EngineClient, config: ServerConfig, listener: socket.socket) -> bool:
    """Serve until SIGTERM or SIGINT, then let running requests end. Returns: False if the engine's process
    was lost."""
    fast = uvicorn.Config("", log_config=None).get_loop_factory()  # uvloop if available: less time per chunk
    with asyncio.Runner(loop_factory=fast) as runner:
        return runner.run(_serve(engine, config, listener))


async def _serve(engine: EngineClient, config: ServerConfig, listener: socket.socket) -> bool:
    asyncio.get_running_loop().set_exception_handler(log_loop_error)
    server = Server(Service(engine, config))
    if not allow_files(config.max_connections):
        logger.warning("the system allows fewer open files than --max-connections takes (ulimit -n)")
    gc.freeze()  # excludes existing objects from every later collection
    for line in facts_of_start(engine.served, config, listener):
        logger.info(line)
    losing = asyncio.ensure_future(server.exit_when_lost())
    try:
        await server.serve(sockets=[listener])
    finally:
        losing.cancel()
        gc.unfreeze()  # so that native libraries' resources are collected at exit
    return not server.lost


def facts_of_start(served: ServedModel, config: ServerConfig, listener: socket.socket) -> Iterator[str]:
    """Yield log lines about a ready server: address, page, keys, compression, pool and context."""
    address = address_of(listener)
    yield f"serving {', '.join(config.served_model_name)} at {address} (API: {address}/v1)"
    num_keys = len(config.api_keys)
    yield f"page: {address}/; API keys: {num_keys or 'none needed'}"
    compression = "none, every token is kept" if served.compression is None else served.compression.in_words
    yield f"compression: {compression}"
    num_tokens = served.num_blocks * served.block_size
    yield (
        f"pool: {served.num_blocks:,} blocks of {served.block_size} tokens, {num_tokens:,} tokens, "
        f"{served.kv_bytes / (1 << 30):.2f} GiB of {served.kv_format}"
    )
    yield f"context: {served.max_model_len:,} tokens per request"


class Server(DrainingServer):
    """Lets running answers end within the timeout, and exits with 0 after a signal.

    lost: the engine's process exited by itself
    """

    def __init__(self, service: Service) -> None:
        app = create_app(service)
        refusals = Refusals(app.state.metrics.http.refused)
        super().__init__(HTTPConfig(app, service.config, refusals), service.draining)
        self.service = service
        self.lost = False

    async def exit_when_lost(self) -> None:
        """Stop the server for its supervisor to restart it, after clients got their last errors."""
        await self.service.engine.lost.wait()
        if not self.should_exit:
            self.lost = True
            await asyncio.sleep(LAST_BYTES_S)  # meanwhile /health reports it
            self.config.timeout_graceful_shutdown = LAST_BYTES_S
            self.should_exit = True

    def left(self) -> str:
        timeout = self.service.config.shutdown_timeout_s
        return f"{self.service.engine.num_requests} to finish, in {timeout:g} s at most"

    async def drain(self) -> None:
        engine, timeout = self.service.engine, self.service.config.shutdown_timeout_s
        deadline = time.monotonic() + timeout
        try:
            await asyncio.wait_for(engine.drained(), timeout)
        except TimeoutError:
            logger.warning("%d requests did not finish in %g s and are aborted", engine.num_requests, timeout)
            await engine.abort_all()
        finally:
            # The last bytes may still be in transit to slow clients.
            left = math.ceil(deadline - time.monotonic())
            self.config.timeout_graceful_shutdown = max(LAST_BYTES_S, left)
            self.should_exit = True
