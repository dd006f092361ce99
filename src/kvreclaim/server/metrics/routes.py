"""`/metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvreclaim.server.errors import OpenAIError
from kvreclaim.server.metrics import Metrics
from kvreclaim.server.service import ServiceDep

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
    """Prometheus' text format 0.0.4, which every scraper takes; also when the engine cannot go on.

    Never OpenMetrics: there prometheus_client writes the colons of our names as underscores.
    """
    metrics: Metrics = request.app.state.metrics
    await metrics.refresh(service.engine)
    return Response(metrics.text(), headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
