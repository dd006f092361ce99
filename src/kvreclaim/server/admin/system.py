"""Routes about the server itself."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel

from kvreclaim import __version__
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.server.base.errors import ApiError, OpenAIError
from kvreclaim.server.shared.service import ServiceDep

router = APIRouter(tags=["server"])


class Health(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class ServerLoad(BaseModel):
    """Current requests and blocks.

    server_load: running and waiting requests (vLLM's field)
    """

    server_load: int
    num_requests_running: int
    num_requests_waiting: int
    num_blocks: int
    blocks_in_use: int
    blocks_cached: int
    blocks_pinned: int
    blocks_free: int


@router.get("/health", responses={503: {"model": OpenAIError}})
async def health(service: ServiceDep) -> Health:
    """State of the server: 200 while the engine serves; 503 if it has stopped or the server shuts down."""
    if service.engine.death is not None:
        raise ApiError(503, f"the engine has stopped ({service.engine.death}); restart the server.")
    if service.draining.is_set():
        raise ApiError(503, "the server is shutting down.")
    return Health(status="ok")


@router.get("/version", responses={401: {"model": OpenAIError}})
async def version() -> Version:
    return Version(version=__version__)


@router.get("/load", responses={401: {"model": OpenAIError}, 503: {"model": OpenAIError}})
async def load(service: ServiceDep) -> ServerLoad:
    """Current requests and blocks, read between two steps, so the figures are consistent."""
    return await service.engine.call(load_of)


def load_of(host: EngineCore) -> ServerLoad:
    engine = host.engine
    stats, scheduler = engine.memory.stats(), engine.scheduler
    return ServerLoad(
        server_load=len(engine.requests),
        num_requests_running=len(scheduler.running),
        num_requests_waiting=len(scheduler.waiting),
        num_blocks=stats.num_blocks,
        blocks_in_use=stats.in_use,
        blocks_cached=stats.cached,
        blocks_pinned=stats.pinned,
        blocks_free=stats.free,
    )
