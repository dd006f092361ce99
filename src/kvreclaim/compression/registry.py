"""From the name of a policy to the policy. Third parties add theirs as entry points of the group
`kvreclaim.policies` (name = "package.module:Class"); a built-in name cannot be taken over."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from importlib.metadata import entry_points
from types import MappingProxyType

from kvreclaim.compression.policies.evict_only import EvictOnly
from kvreclaim.compression.policies.full import Full
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.compression.policies.streaming_llm import StreamingLLM
from kvreclaim.compression.policies.triattention import TriAttention
from kvreclaim.compression.policy import CompressionPolicy
from kvreclaim.errors import InvalidArgumentError

ENTRY_POINT_GROUP = "kvreclaim.policies"
DEFAULT_POLICY = "query_mixture"
_BUILT_IN: Mapping[str, type[CompressionPolicy]] = MappingProxyType(
    {cls.name: cls for cls in (QueryMixture, TriAttention, Knorm, StreamingLLM, Full, EvictOnly)}
)
_SPEC = re.compile(r"\s*([\w.-]+)\s*(?:\((.*)\)\s*)?")
_WRAPPED = "inner"


def policy_names() -> tuple[str, ...]:
    """Built-in names, then those of third parties in alphabetical order."""
    others = {point.name for point in entry_points(group=ENTRY_POINT_GROUP)}
    return (*_BUILT_IN, *sorted(others - _BUILT_IN.keys()))


def policy_class(name: str) -> type[CompressionPolicy]:
    """Raises InvalidArgumentError for a name that is not known or whose entry point is no policy."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    for point in entry_points(group=ENTRY_POINT_GROUP, name=name):
        try:
            cls = point.load()
        except Exception as error:  # a third party's module may fail in any way
            raise InvalidArgumentError(
                f"policy {name!r} ({point.value}) cannot be imported: {type(error).__name__}: {error}; "
                "repair or uninstall its package."
            ) from error
        if not (isinstance(cls, type) and issubclass(cls, CompressionPolicy) and is_dataclass(cls)):
            raise InvalidArgumentError(
                f"policy {name!r} is {point.value!r}, which is no dataclass derived from CompressionPolicy."
            )
        return cls
    raise InvalidArgumentError(f"policy {name!r} is unknown; known are {', '.join(policy_names())}.")


def make_policy(spec: str, options: Mapping[str, object] | None = None) -> CompressionPolicy:
    """Build the policy that spec names.

    Args:
        spec:    a name, or a wrapper around one: "evict-only(knorm)"; a bare wrapper wraps query_mixture
        options: fields of the policy (of the innermost one, where there is a wrapper)

    Raises: InvalidArgumentError for an unknown name, option or value.
    """
    match = _SPEC.fullmatch(spec) if isinstance(spec, str) else None
    if match is None:
        raise InvalidArgumentError(
            f"policy {spec!r} is no name; write one of {', '.join(policy_names())}, or wrapper(name)."
        )
    name, inner = match.groups()
    cls = policy_class(name)
    if _WRAPPED in _field_names(cls):
        return cls(**{_WRAPPED: make_policy(DEFAULT_POLICY if inner is None else inner, options)})
    if inner is not None:
        raise InvalidArgumentError(f"policy {spec!r}: {name} wraps no other policy; write {name!r} alone.")
    return cls(**_known_options(cls, options or {}))


def _field_names(cls: type[CompressionPolicy]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls) if field.init)  # type: ignore[arg-type]


def _known_options(cls: type[CompressionPolicy], options: Mapping[str, object]) -> dict[str, object]:
    allowed = _field_names(cls)
    for option in options:
        if option not in allowed:
            takes = f"its options are {', '.join(allowed)}" if allowed else "it has no options"
            raise InvalidArgumentError(f"policy {cls.name} has no option {option!r}; {takes}.")
    for field in fields(cls):  # type: ignore[arg-type]
        optional = field.default is not MISSING or field.default_factory is not MISSING or not field.init
        if not optional and field.name not in options:
            raise InvalidArgumentError(f"policy {cls.name} needs the option {field.name!r}; add it.")
    return dict(options)
