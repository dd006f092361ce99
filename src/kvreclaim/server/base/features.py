"""HTTP fields of the features of requests (kvreclaim/engine/features/)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

from pydantic import BaseModel, create_model

from kvreclaim.engine.features import FEATURES

T = TypeVar("T", bound=BaseModel)
FIELDS = {feature: tuple(names) for feature in FEATURES if (names := feature.http_fields())}
"""Features with fields in HTTP bodies, and the names of these."""


def feature_fields() -> Iterator[str]:
    """Names of all features' fields."""
    return (name for names in FIELDS.values() for name in names)


def with_features(body: type[T]) -> type[T]:
    """Add the fields of all features to a body."""
    found: dict[str, Any] = {}
    for feature in FEATURES:
        found |= feature.http_fields()
    return create_model(
        body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **found
    )


def with_usage(schema: type[T]) -> type[T]:
    """Add the figures of all features to the schema of usage.kv_cache."""
    found: dict[str, Any] = {name: (int, ...) for feature in FEATURES for name in feature.usage}
    return create_model(
        schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **found
    )


def http_options(body: BaseModel) -> dict[type, Any]:
    """The options in a body, by their types. Raises: InvalidArgumentError."""
    found: dict[type, Any] = {}
    for feature, names in FIELDS.items():
        option = feature.option_of({name: getattr(body, name) for name in names})
        if option is not None:
            found[feature.option] = option
    return found
