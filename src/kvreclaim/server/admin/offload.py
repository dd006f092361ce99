"""Operator routes for host, disk and the prefix cache."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict

from kvreclaim.engine.offload.stats import TierStats
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.server.base.errors import ApiError, OpenAIError
from kvreclaim.server.shared.service import ServiceDep

router = APIRouter(tags=["server"])

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
