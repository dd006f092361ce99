"""`/`, its files, its feed, and the settings of its form. The gate admits only the operator."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import suppress
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import JSONResponse, Response

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policy import Wrapper
from kvreclaim.compression.registry import policy_class, policy_names
from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.engine.serving.served import Auto
from kvreclaim.errors import EngineDeadError, KVReclaimError
from kvreclaim.page.feed import Feed
from kvreclaim.page.files import INDEX, StaticFile, static_files
from kvreclaim.page.frames import frame_event
from kvreclaim.page.viewer import MAX_VIEWERS, PERIOD_S, QUIET_S
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.http.events import stream_events
from kvreclaim.server.page import snapshot as reading
from kvreclaim.server.shared.service import Service, service_of

logger = logging.getLogger(__name__)


class EngineFeed(Feed):
    """Reads the engine five times a second while there are viewers."""

    def __init__(self, service: Service) -> None:
        super().__init__(logger)
        self._service = service

    def check_room(self) -> None:
        """Raises: ApiError 429 with too many viewers, 503 while the server shuts down."""
        if self._service.draining.is_set():
            raise ApiError(503, "the server is shutting down.")
        if self.is_full:
            words = f"{MAX_VIEWERS} pages watch already; close one of them."
            raise ApiError(429, words, headers={"retry-after": "5"})

    async def _read(self) -> str:
        engine, draining = self._service.engine, self._service.draining
        try:
            while self._viewers and not draining.is_set():  # a viewer may come while the recording ends
                await engine.call(reading.begin)
                await self._show_all(engine, draining)
                await engine.call(reading.end)
        except EngineDeadError:
            logger.info("the page's feed ends with the engine")
            return "stopped"
        return "draining"

    async def _show_all(self, engine: EngineClient, draining: asyncio.Event) -> None:
        last, sent_s = b"", 0.0
        while self._viewers and not draining.is_set():
            snapshot = await engine.call(reading.take)
            body, frame = await asyncio.to_thread(frame_event, snapshot)
            news = body != last or snapshot.at_s - sent_s >= QUIET_S
            if news:
                last, sent_s = body, snapshot.at_s
            self._show(frame if news else None, snapshot.compactions)
            with suppress(TimeoutError):
                await asyncio.wait_for(draining.wait(), PERIOD_S)


def _answer(file: StaticFile, request: Request) -> Response:
    """Answer 304 if the browser has the file."""
    if request.headers.get("if-none-match") == file.headers["etag"]:
        kept = {name: value for name, value in file.headers.items() if name != "content-type"}
        return Response(status_code=304, headers=kept)
    return Response(file.content, headers=file.headers)


def install_page(app: FastAPI, service: Service) -> None:
    """Add the page's routes, which the API's description omits."""
    router = APIRouter(include_in_schema=False)
    folder = files("kvreclaim.server.page")
    static = static_files(read_only=False)
    examples: dict[str, Any] = json.loads((folder / "examples.json").read_bytes())
    # FastAPI remembers routes for ever, so they must not hold the service.
    app.state.page_feed = EngineFeed(service)

    @router.get("/")
    async def index(request: Request) -> Response:
        return _answer(static[INDEX], request)

    @router.get("/page/static/{name}")
    async def static_file(name: str, request: Request) -> Response:
        if name not in static:
            raise ApiError(404, f"the page has no file {name!r}.")
        return _answer(static[name], request)

    @router.get("/page/feed")
    async def events(request: Request) -> Response:
        feed: EngineFeed = request.app.state.page_feed
        feed.check_room()
        return await stream_events(feed.watch(), request)

    @router.get("/page/settings")
    async def settings(request: Request) -> Response:
        service = service_of(request)
        return JSONResponse(_settings(service, await service.engine.call(available_policies)))

    @router.get("/page/examples")
    async def known_examples(request: Request) -> Response:
        is_demo = _knows(service_of(request), examples["demo"][0]["prompt"])
        return JSONResponse(examples["demo" if is_demo else "text"])

    app.include_router(router)


def _settings(service: Service, policies: list[str]) -> dict[str, Any]:
    """Settings that the page's form offers."""
    served, config = service.engine.served, service.config
    own, block_bytes = served.compression, served.kv_bytes // served.num_blocks
    return {
        "models": config.served_model_name,
        "num_blocks": served.num_blocks,
        "block_size": served.block_size,
        "block_bytes": block_bytes,
        "full_block_bytes": round(block_bytes * served.density),  # in the model's dtype
        "max_model_len": served.max_model_len,
        "policies": policies,
        "chat": bool(config.chat_template or getattr(service.engine.tokenizer, "chat_template", None)),
        "default_policy": own and own.policy,
        "default_budget": None if own is None or own.is_of_prompt else own.budget,
        "default_words": own and own.budget_in_words,
        "client_kv_compression": config.client_kv_compression,
    }


def available_policies(host: EngineCore) -> list[str]:
    """List every policy that this engine supports, as text with its defaults; the one that auto stands for
    comes first. Reads files the first time."""
    first = Auto.of(host.llm).policy or Wrapper.default_inner
    found = []
    for name in (first, *policy_names()):
        with suppress(KVReclaimError):
            if name == first or (name != "full" and not issubclass(policy_class(name), Wrapper)):
                host.engine.factory.check_compression(
                    host.llm.compressor(CompressionConfig(name)), scored=False
                )
                found.append(name)
    return list(dict.fromkeys(found))


def _knows(service: Service, text: str) -> bool:
    """Whether each word of the text is one token, as in the demo model's language."""
    return service.engine.tokenizer is not None and len(service.encode(text)) == len(text.split())
