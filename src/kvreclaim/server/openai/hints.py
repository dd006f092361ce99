"""Agents' hints: the request's priority, and how long its cache stays useful."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from kvreclaim.engine.api.exports import EVERYTHING, Retention
from kvreclaim.refusals import Feature
from kvreclaim.server.base.config import MAX_INT32
from kvreclaim.server.base.errors import ApiError, refuse_fields
from kvreclaim.server.base.fields import Fields, described
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.shared.bodies import check_priority
from kvreclaim.server.shared.service import Service

PRIORITY = "nvext.agent_hints.priority"
DEFAULT_TTL_S = 300.0
MAX_TTL_S = 86_400
UNITS_S = {"s": 1, "m": 60, "h": 3600}


def seconds_of(ttl: str) -> int:
    """Parse a duration such as 5m. Raises: ValueError beyond a day."""
    seconds = int(ttl[:-1]) * UNITS_S[ttl[-1]]
    if seconds > MAX_TTL_S:
        raise ValueError(f"{seconds} seconds")
    return seconds


def _checked(ttl: str) -> str:
    seconds_of(ttl)
    return ttl


Ttl = Annotated[
    Annotated[str, Field(pattern=r"^[1-9][0-9]{0,4}[smh]$"), AfterValidator(_checked)],
    described("a time such as '30s', '5m' or '1h', at most '24h'"),
]


class AgentHints(Fields):
    """priority: higher is more urgent"""

    priority: int | None = Field(None, ge=-MAX_INT32, le=MAX_INT32)


class TextCacheControl(Fields):
    """ttl: as text"""

    type: Literal["ephemeral"]
    ttl: Ttl | None = None


class NvExt(Fields):
    """Dynamo's extensions, without those for its router."""

    agent_hints: AgentHints | None = None
    cache_control: TextCacheControl | None = None


class CacheControlParams(Fields):
    """ttl: in seconds"""

    type: Literal["ephemeral"] | None = None
    ttl: float | None = Field(None, gt=0, le=3600)


class AgentHint(Fields):
    """Hints of vLLM's RFC 52113. A conversation is identified by its tokens, so sessions have no ids."""

    cache_control: CacheControlParams | None = None


def hinted_retention(nvext: NvExt | None, agent_hint: AgentHint | None, service: Service) -> list[Retention]:
    """Return how long the whole request, including its answer, is kept. Raises: ApiError naming the field."""
    found: dict[str, float] = {}
    if nvext is not None and (control := nvext.cache_control) is not None:
        ttl_s = DEFAULT_TTL_S if control.ttl is None else float(seconds_of(control.ttl))
        found["nvext.cache_control"] = ttl_s
    if agent_hint is not None and (params := agent_hint.cache_control) is not None:
        found["agent_hint.cache_control"] = DEFAULT_TTL_S if params.ttl is None else params.ttl
    is_off = not service.engine.served.config["enable_prefix_caching"]
    refuse_fields({Feature.RETENTION: bool(found), Feature.NO_PREFIX_CACHE: is_off}, next(iter(found), None))
    return [Retention(EVERYTHING, ttl_s) for ttl_s in found.values()]


def checked_priority(priority: int, nvext: NvExt | None, tenant: Tenant, service: Service) -> int:
    """Return the engine's priority: the request's own, or the hint. Raises: ApiError naming the field."""
    hints = None if nvext is None else nvext.agent_hints
    hint = None if hints is None else hints.priority
    if hint is None:
        check_priority(priority, tenant, service.config)
        return priority
    if priority not in (0, -hint):
        raise ApiError(
            400,
            f"{PRIORITY} is {hint}, which means {-hint}, but priority is {priority}; leave one out.",
            PRIORITY,
        )
    most = -service.config.min_priority
    if hint > most and not tenant.operator:
        raise ApiError(
            400, f"{PRIORITY} is {hint}, but this key may ask for {most} or less; lower it.", PRIORITY
        )
    is_first_come = service.engine.served.config["scheduling_policy"] == "fcfs"
    refuse_fields({Feature.PRIORITY: hint or None, Feature.FIRST_COME: is_first_come}, PRIORITY)
    return -hint
