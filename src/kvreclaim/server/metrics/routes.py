"""`/metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder

from kvreclaim.server.errors import OpenAIError

router = APIRouter(tags=["server"])
OPENMETRICS = "application/openmetrics-text"
TEXT = {"schema": {"type": "string"}}


@router.get(
    "/metrics",
    response_class=Response,
    responses={
        200: {"content": {CONTENT_TYPE_PLAIN_0_0_4.split(";")[0]: TEXT, OPENMETRICS: TEXT}},
        401: {"model": OpenAIError},
    },
)
async def metrics(request: Request) -> Response:
    """Prometheus' text format, or OpenMetrics where it is asked for. Answers also when the engine cannot."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(request.app.state.metrics.registry), headers={"content-type": content_type})
