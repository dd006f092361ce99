"""Engine settings from a request's fields; an error names the field."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import SAMPLING
from kvreclaim.server.base.tenants import Tenant

SHARED = (*SAMPLING, "logit_bias")
"""Fields of SamplingParams with the same name in both dialects."""


def sampling_of(given: Mapping[str, Any], fields: Container[str]) -> SamplingParams:
    """given: SamplingParams' fields by name; None means absent, and without max_tokens the answer may fill
    the context. fields: the request's own names, for errors. Raises: ApiError 400."""
    settings = {name: value for name, value in given.items() if value is not None}
    if isinstance(bias := settings.get("logit_bias"), Mapping):
        settings["logit_bias"] = _logit_bias(bias)
    try:
        return SamplingParams(**{"max_tokens": None, **settings})
    except InvalidArgumentError as error:
        raise ApiError(400, str(error), error.field if error.field in fields else None) from error


def check_priority(priority: int, tenant: Tenant, limits: ServerConfig) -> None:
    """Raises: ApiError 400 for a priority more urgent than allowed."""
    if priority < limits.min_priority and not tenant.operator:
        raise ApiError(
            400,
            f"priority is {priority}, but this key may ask for {limits.min_priority} or more (more is less "
            "urgent); raise it.",
            "priority",
        )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Convert JSON's keys, which are strings."""
    wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        raise ApiError(
            400, f'logit_bias has the key {wrong[0]!r}; keys are token ids, such as "42".', "logit_bias"
        )
    return {int(key): bias for key, bias in given.items()}
