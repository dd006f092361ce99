"""`/metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from kvreclaim.server.errors import OpenAIError

router = APIRouter(tags=["server"])


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {"text/plain": {"schema": {"type": "string"}}}},
        401: {"model": OpenAIError},
    },
)
async def metrics(request: Request) -> Response:
    """Prometheus' text format 0.0.4, which every scraper takes; also when the engine cannot go on.

    Never OpenMetrics: there prometheus_client writes the colons of our names as underscores.
    """
    text = generate_latest(request.app.state.metrics.registry)
    return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})
