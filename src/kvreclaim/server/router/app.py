"""The server of several models: reads the model's name, and passes bytes on."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query
from prometheus_client import Counter, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic_core import from_json
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from kvreclaim import __version__
from kvreclaim.server.base.errors import ApiError, install_handlers
from kvreclaim.server.base.model_names import Page, known
from kvreclaim.server.http.connections import HTTPConfig, Refusals, allow_files
from kvreclaim.server.http.draining import LAST_BYTES_S, DrainingServer
from kvreclaim.server.http.events import error_event, or_disconnect
from kvreclaim.server.http.gate import MAX_BODY_BYTES, guard, read_body
from kvreclaim.server.http.listener import address_of
from kvreclaim.server.router.child import LOST, Child
from kvreclaim.server.router.fleet import Fleet

logger = logging.getLogger(__name__)
STORED = "/v1/responses/"
"""Requests about kept responses name no model."""


class ModelRouter:
    """The requests to all models."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.config = fleet.config
        self.names = list(fleet.presets)
        self.started_s = int(time.time())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request to a model."""
        request = Request(scope, receive)
        try:
            body = await read_body(request, self.config.body_timeout_s)
        except ClientDisconnect:
            return
        await or_disconnect(self._answer(request, body, send), receive)

    async def _answer(self, request: Request, body: bytes, send: Send) -> None:
        name = model_in(request, body)
        if name is None and request.scope["path"].startswith(STORED):
            for child in [each for each in self.fleet.children.values() if each.ready.done()]:
                if await self._pass(child, request, body, send, unless_404=True):
                    return
            raise ApiError(404, "no loaded model keeps this response; a model forgets them when unloaded.")
        if name is None:
            raise ApiError(
                400,
                "the request names no model; pass `model` in the JSON body, or ?model=NAME; this server has "
                f"{', '.join(self.names)}.",
                param="model",
            )
        preset = self.fleet.presets[known(name, self.names)]
        if request.method == "POST":
            async with self.fleet.using(preset) as child:
                await self._pass(child, request, body, send)
            return
        found = self.fleet.children.get(preset.names[0])
        if found is None or not found.ready.done():
            raise ApiError(503, f"model {name!r} is not loaded; a POST request loads it.", param="model")
        await self._pass(found, request, body, send)

    async def _pass(
        self, child: Child, request: Request, body: bytes, send: Send, *, unless_404: bool = False
    ) -> bool:
        """Pass a request on, and its answer back. Returns: False without an answer if that is a 404."""
        scope, start = request.scope, None
        query = b"&".join(each for each in scope["query_string"].split(b"&") if each[:6] != b"model=")
        target = scope["raw_path"] + (b"?" + query if query else b"")
        try:
            async with aclosing(child.ask(scope["method"], target, scope["headers"], body)) as messages:
                async for message in messages:
                    if start is None and unless_404 and message["status"] == 404:
                        return False
                    start = start or message
                    await send(message)
        except LOST:
            error = ApiError(503, "the model's process has ended; send the request again, which restarts it.")
            if start is None:
                raise error from None
            if not dict(start["headers"]).get(b"content-type", b"").startswith(b"text/event-stream"):
                raise  # the client sees a broken connection
            await send({"type": "http.response.body", "body": error_event(error, scope)})
        return True

    async def health(self) -> dict[str, str]:
        if self.fleet.draining.is_set():
            raise ApiError(503, "the server is shutting down.")
        return {"status": "ok"}

    async def version(self) -> dict[str, str]:
        return {"version": __version__}

    async def models(self, page: Annotated[Page, Query()]) -> dict[str, Any]:
        return page.of(self.names, self._entry)

    async def model(self, model_id: str) -> dict[str, Any]:
        return self._entry(known(model_id, self.names))

    def _entry(self, name: str) -> dict[str, Any]:
        """One model as in a server of it alone (its length is known once it was loaded), and its state as in
        llama.cpp's router."""
        own = self.fleet.presets[name].names[0]
        child = self.fleet.children.get(own)
        state = "unloaded" if child is None else "loaded" if child.ready.done() else "loading"
        at = {"created": self.started_s, "created_at": datetime.fromtimestamp(self.started_s, UTC)}
        kind = {"object": "model", "type": "model", "owned_by": "kvreclaim", "lifecycle": "active"}
        named = {"id": name, "display_name": name, "status": {"value": state}}
        return {**kind, **self.fleet.facts.get(own, {}), **at, **named}

    async def metrics(self) -> Response:
        return Response(
            generate_latest(self.fleet.registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4}
        )

    async def page(self) -> Response:
        rows = [f"{name}: {self._entry(name)['status']['value']}" for name in self.names]
        return PlainTextResponse("\n".join(["kvreclaim serves these models at /v1:", *rows, ""]))


def model_in(request: Request, body: bytes) -> str | None:
    """Return the model that a request names in its query or body. Raises: ApiError 400."""
    given = request.query_params.get("model")
    if given is None and body:
        try:
            value = from_json(body)
        except ValueError as error:
            raise ApiError(400, f"the body is not JSON: {error}.") from None
        given = value.get("model") if isinstance(value, dict) else None
    if given is not None and not isinstance(given, str):
        raise ApiError(400, "model is no text; pass the name of a model.", param="model")
    return given


class RouterServer(DrainingServer):
    """The server of several models. At a signal, each of their processes lets its requests end."""

    def __init__(self, fleet: Fleet) -> None:
        refused = Counter(
            "kvreclaim:connections_refused", "Refused connections.", ["status"], registry=fleet.registry
        )
        refusals = Refusals(lambda status: refused.labels(str(status)).inc())
        super().__init__(HTTPConfig(_app(ModelRouter(fleet)), fleet.config, refusals), fleet.draining)
        self.fleet = fleet

    def left(self) -> str:
        timeout_s = self.fleet.config.shutdown_timeout_s
        return f"requests to {len(self.fleet.children)} models may take {timeout_s:g} s to finish"

    async def drain(self) -> None:
        await self.fleet.stop_all()
        self.config.timeout_graceful_shutdown = LAST_BYTES_S
        self.should_exit = True

    def abandon(self) -> None:
        for child in self.fleet.children.values():
            child.kill()


class _Named(Route):
    """Matches what names a model in its query, which comes before this server's own routes."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return (match if "model" in QueryParams(scope["query_string"]) else Match.NONE), found


def _app(router: ModelRouter) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        unloading = asyncio.create_task(router.fleet.unload_idle()) if router.fleet.idle_timeout_s else None
        try:
            yield
        finally:
            if unloading is not None:
                unloading.cancel()
            await router.fleet.stop_all()

    app = FastAPI(lifespan=lifespan, openapi_url=None, redirect_slashes=False)
    install_handlers(app)
    routes: dict[str, Callable[..., Any]] = {
        "/": router.page,
        "/health": router.health,
        "/version": router.version,
        "/metrics": router.metrics,
        "/v1/models": router.models,
        "/v1/models/{model_id:path}": router.model,
    }
    for path, answer in routes.items():
        app.add_api_route(path, answer)
    app.router.routes.insert(0, _Named("/{path:path}", router))
    app.router.routes.append(Route("/{path:path}", router))
    guard(app, router.config, router.config.max_body_bytes or MAX_BODY_BYTES)
    return app


def serve(fleet: Fleet, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then stop every model."""
    if not allow_files(2 * fleet.config.max_connections):
        logger.warning("the system allows fewer open files than --max-connections takes (ulimit -n)")
    address = address_of(listener)
    logger.info("serving %s at %s (API: %s/v1)", ", ".join(fleet.presets), address, address)
    limit = "" if fleet.limit_gib is None else f", in {fleet.limit_gib:g} GiB"
    logger.info("at most %d models are loaded at once%s", fleet.most, limit)
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        runner.run(RouterServer(fleet).serve(sockets=[listener]))
