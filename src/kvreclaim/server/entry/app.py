"""The FastAPI app: every route, behind the gate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI

from kvreclaim import __version__
from kvreclaim.server.admin import offload, slots, system
from kvreclaim.server.admin.observe import observe, stop_observing
from kvreclaim.server.anthropic import routes as anthropic
from kvreclaim.server.base.errors import install_handlers
from kvreclaim.server.http.gate import Gate
from kvreclaim.server.openai import chat, completions, models, tokenizing
from kvreclaim.server.page.routes import install_page
from kvreclaim.server.responses import routes as responses
from kvreclaim.server.responses.store import ResponseStore
from kvreclaim.server.shared.bodies import body_limit
from kvreclaim.server.shared.service import Service


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
    install_handlers(app)
    app.include_router(system.router)
    app.include_router(offload.router)
    for room in (completions, chat, responses, models, tokenizing):
        app.include_router(room.router)
    app.include_router(anthropic.router)
    app.include_router(slots.router)
    install_page(app, service)
    limit = body_limit(service.config.max_body_bytes, service.longest)
    app.add_middleware(Gate, config=service.config, max_body_bytes=limit)
    observe(app, service)
    return app
