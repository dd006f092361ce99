"""The server of several models: reads the model's name, loads and unloads, and passes bytes on."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic_core import from_json
from starlette.datastructures import QueryParams
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Match, Route
from starlette.types import Receive, Scope, Send

from kvreclaim import __version__
from kvreclaim.checks import require
from kvreclaim.server.base.config import Preset, RouterConfig, ServerConfig
from kvreclaim.server.base.errors import ApiError, install_handlers
from kvreclaim.server.base.model_names import Page, known
from kvreclaim.server.http.connections import HTTPConfig, Refusals, allow_files
from kvreclaim.server.http.draining import LAST_BYTES_S, DrainingServer
from kvreclaim.server.http.events import error_event, or_disconnect
from kvreclaim.server.http.gate import MAX_BODY_BYTES, guard, read_body
from kvreclaim.server.http.listener import address_of
from kvreclaim.server.router.child import LOST, Child

logger = logging.getLogger(__name__)
POLL_S = 0.1
DEFAULT_LOADED = 3
POOL_FRACTION = 0.5
"""Share of the free memory for the pools of all models, where no limit is set."""
STORED = "/v1/responses/"
"""Requests about kept responses name no model."""


class Router:
    """The models and their processes.

    turn: held while a request finds or starts its model, in the order of arrival. While one waits for room,
          later ones wait behind it, so a model in constant use cannot keep another out
    """

    def __init__(
        self, presets: Sequence[Preset], config: ServerConfig, routing: RouterConfig, limit_gib: float | None
    ) -> None:
        self.presets = {name: preset for preset in presets for name in preset.names}
        self.names = list(self.presets)
        self.config = config
        self.idle_timeout_s = routing.idle_timeout_s
        self.most = min(routing.max_loaded or DEFAULT_LOADED, len(presets))
        self.limit_gib = limit_gib
        self.draining = asyncio.Event()
        self.turn = asyncio.Lock()
        self.children: dict[str, Child] = {}
        self.facts: dict[str, dict[str, Any]] = {}
        self.started_s = int(time.time())
        single = config.api_keys[0] if len(config.api_keys) == 1 else None
        self._key = config.operator_key or single or (secrets.token_hex() if config.api_keys else None)
        self._passed = self._options()
        self.registry = CollectorRegistry()
        count = partial(Counter, labelnames=["model_name"], registry=self.registry)
        self.loads = count("kvreclaim:model_loads", "Starts of a model's process.")
        self.unloads = count("kvreclaim:model_unloads", "Ends of a model's process.")
        loaded = Gauge("kvreclaim:models_loaded", "Models that load or are loaded.", registry=self.registry)
        loaded.set_function(lambda: len(self.children))
        refused = Counter(
            "kvreclaim:connections_refused", "Refused connections.", ["status"], registry=self.registry
        )
        self.count_refusal = lambda status: refused.labels(str(status)).inc()
        for preset in presets:
            require(
                limit_gib is None or self._memory_gib(preset) <= limit_gib,
                f"{preset.names[0]} has memory-limit {preset.memory_gib}, but all models together have "
                f"{limit_gib} GiB (--memory-limit); lower it, or raise that.",
            )

    def _options(self) -> list[str]:
        """Options of every model's process. Their limits on connections count this server as one client."""
        config = self.config
        operator = self._key if config.operator_key or len(config.api_keys) > 1 else None
        return [
            f"--max-connections={config.max_connections}",
            f"--max-connections-per-address={config.max_connections}",
            f"--shutdown-timeout={config.shutdown_timeout_s}",
            *(f"--api-key={key}" for key in config.api_keys),
            *([] if operator is None else [f"--operator-key={operator}"]),
            *([] if config.tenant_secret is None else [f"--tenant-secret={config.tenant_secret}"]),
        ]

    def _memory_gib(self, preset: Preset) -> float:
        return preset.memory_gib or (self.limit_gib or 0.0) / self.most

    def _fits(self, preset: Preset, without: Sequence[Child] = ()) -> bool:
        """Whether the model may be loaded beside the others, less these."""
        left = [name for name, child in self.children.items() if child not in without]
        taken = sum(self._memory_gib(self.presets[name]) for name in left)
        within = self.limit_gib is None or taken + self._memory_gib(preset) <= self.limit_gib + 1e-6
        return within and len(left) < self.most

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
            for child in [each for each in self.children.values() if each.ready.done()]:
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
        preset = self.presets[known(name, self.names)]
        if request.method == "POST":
            async with self._using(preset) as child:
                await self._pass(child, request, body, send)
            return
        found = self.children.get(preset.names[0])
        if found is None or not found.ready.done():
            raise ApiError(503, f"model {name!r} is not loaded; a POST request loads it.", param="model")
        await self._pass(found, request, body, send)

    @asynccontextmanager
    async def _using(self, preset: Preset) -> AsyncIterator[Child]:
        """Give the model's process, loaded, which is not stopped inside the block."""
        async with self.turn:
            child = self.children.get(preset.names[0]) or await self._start(preset)
            child.running += 1
        try:
            await asyncio.shield(child.ready)
            yield child
        finally:
            child.running -= 1
            child.used_s = asyncio.get_running_loop().time()

    async def _make_room(self, preset: Preset) -> None:
        """Stop models that run nothing, the least recently used first, or wait for one. Raises: ApiError."""
        waits = False
        while not self._fits(preset) and not self.draining.is_set():
            idle = sorted((each for each in self.children.values() if each.is_idle), key=lambda it: it.used_s)
            free = [child for child in idle if await child.is_free()]
            if self._fits(preset, without=free):
                await self._stop(free[0])
                continue
            if not waits:
                logger.info("%s waits until a loaded model has answered its requests", preset.names[0])
            waits = True
            await asyncio.sleep(POLL_S)
        if self.draining.is_set():
            raise ApiError(503, "the server is shutting down; send the request to another one.")

    async def _start(self, preset: Preset) -> Child:
        await self._make_room(preset)
        name = preset.names[0]
        memory = f"--kv-memory-fraction={POOL_FRACTION / self.most:.3f}"
        if self.limit_gib is not None:
            memory = f"--memory-limit={self._memory_gib(preset)}"
        own = (memory, f"--served-model-name={name}", *preset.arguments)  # of equal options the last counts
        child = await Child.start([*own, *self._passed], self._key)
        child.ready = asyncio.create_task(self._until_ready(name, child))
        child.ready.add_done_callback(lambda task: task.cancelled() or task.exception())
        child.ended = asyncio.create_task(self._until_end(name, child))
        self.children[name] = child
        self.loads.labels(name).inc()
        logger.info("loading %s", name)
        return child

    async def _stop(self, child: Child) -> None:
        await child.stop(self.config.shutdown_timeout_s + 2 * LAST_BYTES_S)

    async def _until_ready(self, name: str, child: Child) -> None:
        try:
            self.facts[name] = (await child.get(b"/v1/models"))["data"][0]
        except LOST:
            code = await child.end(LAST_BYTES_S)
            raise ApiError(
                503, f"model {name!r} did not start (exit code {code}); the server's log has the reason."
            ) from None

    async def _until_end(self, name: str, child: Child) -> None:
        code = await child.process.wait()
        del self.children[name]
        self.unloads.labels(name).inc()
        if child.stopping:
            logger.info("unloaded %s", name)
        else:
            logger.error("the process of %s has ended by itself (exit code %d)", name, code)

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

    async def unload_idle(self) -> None:
        """Stop what has not been used for the idle time, again and again."""
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(min(1.0, self.idle_timeout_s / 4))
            for child in list(self.children.values()):
                if not child.is_idle or clock() - child.used_s < self.idle_timeout_s:
                    continue
                async with self.turn:
                    if child.is_idle and await child.is_free():
                        await self._stop(child)
                    else:
                        child.used_s = clock()

    async def stop_all(self) -> None:
        """Stop every model once its requests have ended."""
        self.draining.set()
        async with self.turn:
            await asyncio.gather(*(self._stop(child) for child in list(self.children.values())))

    async def health(self) -> dict[str, str]:
        if self.draining.is_set():
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
        own = self.presets[name].names[0]
        child = self.children.get(own)
        state = "unloaded" if child is None else "loaded" if child.ready.done() else "loading"
        at = {"created": self.started_s, "created_at": datetime.fromtimestamp(self.started_s, UTC)}
        kind = {"object": "model", "type": "model", "owned_by": "kvreclaim", "lifecycle": "active"}
        named = {"id": name, "display_name": name, "status": {"value": state}}
        return {**kind, **self.facts.get(own, {}), **at, **named}

    async def metrics(self) -> Response:
        return Response(generate_latest(self.registry), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

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

    def __init__(self, router: Router) -> None:
        super().__init__(
            HTTPConfig(_app(router), router.config, Refusals(router.count_refusal)), router.draining
        )
        self.router = router

    def left(self) -> str:
        timeout_s = self.router.config.shutdown_timeout_s
        return f"requests to {len(self.router.children)} models may take {timeout_s:g} s to finish"

    async def drain(self) -> None:
        await self.router.stop_all()
        self.config.timeout_graceful_shutdown = LAST_BYTES_S
        self.should_exit = True

    def abandon(self) -> None:
        for child in self.router.children.values():
            child.kill()


class _Named(Route):
    """Matches what names a model in its query, which comes before this server's own routes."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, found = super().matches(scope)
        return (match if "model" in QueryParams(scope["query_string"]) else Match.NONE), found


def _app(router: Router) -> FastAPI:
    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        unloading = asyncio.create_task(router.unload_idle()) if router.idle_timeout_s else None
        try:
            yield
        finally:
            if unloading is not None:
                unloading.cancel()
            await router.stop_all()

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


def serve(router: Router, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then stop every model."""
    if not allow_files(2 * router.config.max_connections):
        logger.warning("the system allows fewer open files than --max-connections takes (ulimit -n)")
    address = address_of(listener)
    logger.info("serving %s at %s (API: %s/v1)", ", ".join(router.names), address, address)
    limit = "" if router.limit_gib is None else f", in {router.limit_gib:g} GiB"
    logger.info("at most %d models are loaded at once%s", router.most, limit)
    with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
        runner.run(RouterServer(router).serve(sockets=[listener]))
