"""Routes about the server, its metrics and its offloaded blocks; metrics, logs and traces around an app."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, FastAPI, Query, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from pydantic import BaseModel, ConfigDict

from kvreclaim import __version__
from kvreclaim.engine.offload.stats import TierStats
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.server.admin.logs import AccessLog
from kvreclaim.server.base.errors import ApiError, OpenAIError
from kvreclaim.server.metrics.collector import Metrics
from kvreclaim.server.shared.access import Watch, Watcher
from kvreclaim.server.shared.service import Service, ServiceDep

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


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        401: {"model": OpenAIError},
    },
)
async def scrape(request: Request, service: ServiceDep) -> Response:
    """Return the metrics in Prometheus' text format 0.0.4, also when the engine has stopped.

    Never OpenMetrics: there prometheus_client writes the colons of metric names as underscores.
    """
    metrics: Metrics = request.app.state.metrics
    await metrics.refresh(service.engine)
    return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})


def observe(app: FastAPI, service: Service) -> None:
    """Watch every request. Call this last, so that its middleware is the outermost."""
    config, engine = service.config, service.engine
    metrics = Metrics(engine.served, config.served_model_name[0], engine.pid)
    app.state.metrics = metrics
    log = AccessLog(engine.tokenizer, log_prompts=config.log_prompts)
    watchers: list[Watcher] = [metrics.http, log]
    app.state.tracing = None
    if config.otlp_traces_endpoint is not None:
        from kvreclaim.server.admin.tracing import Tracing  # loads OpenTelemetry's SDK

        app.state.tracing = Tracing(config.otlp_traces_endpoint, trusting=config.trust_traceparent)
        watchers.append(app.state.tracing)
    app.add_middleware(Watch, service=service, watchers=tuple(watchers))


async def stop_observing(app: FastAPI) -> None:
    if app.state.tracing is not None:
        await asyncio.to_thread(app.state.tracing.shutdown)


CLEAR_S = 30.0
"""Seconds to wait for the disk to delete its records before an error is returned."""
POLL_S = 0.02


class OffloadStatus(BaseModel):
    """enabled: whether there is a host cache; tiers: null without one."""

    enabled: bool
    tiers: TierStats | None


class Reset(BaseModel):
    """external, reset_external (vLLM's name): clear host and disk as well."""

    model_config = ConfigDict(extra="forbid")

    external: bool = False
    reset_external: bool = False


@router.get("/kv_offload/status", responses={401: {"model": OpenAIError}, 503: {"model": OpenAIError}})
async def status(service: ServiceDep) -> OffloadStatus:
    """Blocks on host and disk, read between two steps, and counts since the start."""
    stats = await service.engine.call(stats_of)
    return OffloadStatus(enabled=stats is not None, tiers=stats)


@router.post(
    "/reset_prefix_cache",
    response_class=Response,
    responses={code: {"model": OpenAIError} for code in (400, 401, 503)},
)
async def reset_prefix_cache(service: ServiceDep, query: Annotated[Reset, Query()]) -> Response:
    """Forget all cached prefixes; running requests continue. `external=true` clears host and disk too, and
    answers once the records on disk are deleted."""
    external = query.external or query.reset_external
    await service.engine.call(partial(forget, external=external))
    try:
        async with asyncio.timeout(CLEAR_S):
            while external and await service.engine.call(is_clearing):
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise ApiError(
            503,
            f"every prefix is forgotten, but the disk did not answer within {CLEAR_S:g} s; its records are "
            "removed when it does, unless the server is killed before.",
        ) from None
    return Response()


def stats_of(host: EngineCore) -> TierStats | None:
    return host.engine.tier_stats()


def forget(host: EngineCore, *, external: bool) -> None:
    host.engine.reset_prefix_cache(external=external)


def is_clearing(host: EngineCore) -> bool:
    """Whether records to be deleted may still be on disk."""
    tiers = host.engine.tiers
    return tiers is not None and tiers.is_clearing
