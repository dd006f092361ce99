"""Install metrics, logs and traces around an app."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvreclaim.server.admin.logs import AccessLog
from kvreclaim.server.base.errors import OpenAIError
from kvreclaim.server.metrics.collector import Metrics
from kvreclaim.server.shared.access import Watch, Watcher
from kvreclaim.server.shared.service import Service, ServiceDep

router = APIRouter(tags=["server"])


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
    app.include_router(router)
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
