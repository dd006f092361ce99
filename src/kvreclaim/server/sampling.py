"""The engine's settings from a request's fields; a refusal names the field."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping
from typing import Any

from kvreclaim.compression import CompressionConfig
from kvreclaim.config import SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.errors import ApiError
from kvreclaim.server.fields import KVCompression

SHARED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "seed",
    "min_tokens",
    "ignore_eos",
)
"""Fields of SamplingParams that have the same name in both dialects."""


def sampling_of(given: Mapping[str, Any], cache_salt: str | None, fields: Container[str]) -> SamplingParams:
    """given: SamplingParams' fields as the request has them; None is left out, and a max_tokens left out is
    as many as fit. fields: the request's own names, one of which the refusal names. Raises: ApiError 400."""
    settings = {name: value for name, value in given.items() if value is not None}
    if isinstance(bias := settings.get("logit_bias"), Mapping):
        settings["logit_bias"] = _logit_bias(bias)
    try:
        return SamplingParams(**{"max_tokens": None, **settings}, cache_salt=cache_salt)
    except InvalidArgumentError as error:
        name = str(error).partition(" ")[0]
        raise ApiError(400, str(error), name if name in fields else None) from error


def compression_of(
    given: KVCompression | None, default: CompressionConfig | None
) -> CompressionConfig | None:
    """None takes the server's own settings. What is left out comes from these, if they are of the same
    policy; statistics always do. Raises: ApiError 400."""
    if given is None:
        return None
    fields = given.model_dump(exclude_none=True)
    try:
        if default is None:
            return CompressionConfig(**fields)
        if fields.get("policy", default.policy) == default.policy:
            return dataclasses.replace(default, **fields)
        return CompressionConfig(**fields, stats=default.stats)
    except InvalidArgumentError as error:
        raise ApiError(400, f"kv_compression: {error}", "kv_compression") from error


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """JSON's keys are strings."""
    wrong = [key for key in given if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        raise ApiError(
            400, f'logit_bias has the key {wrong[0]!r}; keys are token ids, such as "42".', "logit_bias"
        )
    return {int(key): bias for key, bias in given.items()}
