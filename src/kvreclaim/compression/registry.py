"""Registry of policies by name. Third parties add theirs as entry points of the
group `kvreclaim.policies` (name = "package.module:Class"); a built-in name cannot be taken over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from types import MappingProxyType
from typing import Any

from kvreclaim.checks import check_known
from kvreclaim.compression.policies.ada_kv import AdaKV
from kvreclaim.compression.policies.critical import Critical
from kvreclaim.compression.policies.expected_attention import ExpectedAttention
from kvreclaim.compression.policies.full import Full
from kvreclaim.compression.policies.h2o import H2O
from kvreclaim.compression.policies.keydiff import KeyDiff
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.kvzap import KVzap
from kvreclaim.compression.policies.kvzip import KVzip
from kvreclaim.compression.policies.lagkv import LagKV
from kvreclaim.compression.policies.oracle import Oracle
from kvreclaim.compression.policies.paged_eviction import PagedEviction
from kvreclaim.compression.policies.protect import Protect
from kvreclaim.compression.policies.pyramidkv import PyramidKV
from kvreclaim.compression.policies.query_mixture import QueryMixture
from kvreclaim.compression.policies.quest import Quest
from kvreclaim.compression.policies.r_kv import RKV
from kvreclaim.compression.policies.random import Random
from kvreclaim.compression.policies.segments import Segments
from kvreclaim.compression.policies.shares import Shares
from kvreclaim.compression.policies.snapkv import SnapKV
from kvreclaim.compression.policies.streaming_llm import StreamingLLM
from kvreclaim.compression.policies.surrogate import Surrogate
from kvreclaim.compression.policies.tova import TOVA
from kvreclaim.compression.policies.triattention import TriAttention
from kvreclaim.compression.policy import CompressionPolicy, Wrapper
from kvreclaim.compression.spec.arguments import WRAPPED, named_arguments, refuse_unknown, wrapped
from kvreclaim.compression.spec.grammar import Spec, parse_spec, write_value
from kvreclaim.compression_settings import AUTO
from kvreclaim.entry_points import find, names
from kvreclaim.errors import InvalidArgumentError

ENTRY_POINT_GROUP = "kvreclaim.policies"
_BUILT_IN: Mapping[str, type[CompressionPolicy]] = MappingProxyType(
    {
        cls.name: cls
        for cls in (
            QueryMixture,
            TriAttention,
            ExpectedAttention,
            Surrogate,
            KVzip,
            KVzap,
            SnapKV,
            RKV,
            H2O,
            TOVA,
            KeyDiff,
            LagKV,
            Knorm,
            StreamingLLM,
            Random,
            PyramidKV,
            AdaKV,
            Shares,
            PagedEviction,
            Quest,
            Full,
            Oracle,
            Critical,
            Segments,
            Protect,
        )
    }
)


def built_in() -> Mapping[str, type[CompressionPolicy]]:
    """Return the built-in policies by name."""
    return _BUILT_IN


def policy_names() -> tuple[str, ...]:
    """Built-in names, then those of third parties in alphabetical order."""
    return names(_BUILT_IN, ENTRY_POINT_GROUP)


def policy_class(name: str) -> type[CompressionPolicy]:
    """Return a policy's class. Raises: InvalidArgumentError for an unknown name or a wrong entry point."""
    if name == AUTO:
        raise InvalidArgumentError(
            "policy auto stands for a policy that a model's statistics name, and cannot be used here; name "
            "that policy (`kvreclaim calibrate --show FILE` prints it)."
        )
    if (cls := find(_BUILT_IN, ENTRY_POINT_GROUP, name, "policy", CompressionPolicy)) is None:
        check_known("policy", name, policy_names())
    assert cls is not None
    return cls


def make_policy(spec: str, options: Mapping[str, object] | None = None) -> CompressionPolicy:
    """Build the policy that spec names.

    Args:
        spec:    "knorm", "knorm(keep=large)", "segments(query_mixture, n=4)"; the
                 grammar is in spec/grammar.py. A wrapper's first argument is the policy it wraps, the others
                 are its options, by name or in their order; without one it wraps its default_inner
        options: fields of the policy (of the innermost one, where there is a wrapper)

    Raises: InvalidArgumentError for an unknown name, option or value, or an option given twice.
    """
    return _build(parse_spec(spec), options or {})


def policy_spec(policy: CompressionPolicy) -> str:
    """Return the policy's canonical text, with the options that are not at their default:
    make_policy(policy_spec(policy)) == policy.

    Raises: InvalidArgumentError for an option value without a written form.
    """
    parts = []
    for field in _init_fields(type(policy)):
        value = getattr(policy, field.name)
        if field.name == WRAPPED:
            parts.append(policy_spec(value))
        elif value != _default(field):
            parts.append(f"{field.name}={write_value(value)}")
    return f"{policy.name}({', '.join(parts)})" if parts else policy.name


def object_spec(policy: CompressionPolicy) -> tuple[str, CompressionPolicy | None]:
    """Return the text of a policy object, and the object itself unless the text makes an equal one.

    Raises: InvalidArgumentError if it is no frozen dataclass, an option has no written form, or its name is
    that of another policy.
    """
    for each in policy_classes(policy):
        _require_own_name(each)
    text = policy_spec(policy)
    try:
        hash(policy)
    except TypeError as error:
        raise InvalidArgumentError(
            f"policy {text} cannot be hashed ({error}); give its options values that can, such as tuples.",
            field="policy",
        ) from error
    try:
        return text, None if make_policy(text) == policy else policy
    except InvalidArgumentError:  # the name of a policy that is not registered
        return text, policy


def policy_classes(policy: CompressionPolicy) -> list[type[CompressionPolicy]]:
    """Return the policy's class, then those of the policies inside a wrapper."""
    inner = getattr(policy, WRAPPED, None)
    return [type(policy), *(policy_classes(inner) if isinstance(inner, CompressionPolicy) else ())]


def _require_own_name(cls: type[CompressionPolicy]) -> None:
    params: Any = vars(cls).get("__dataclass_params__")
    if params is None or not params.frozen:
        raise InvalidArgumentError(
            f"policy {cls.__name__} is no frozen dataclass; write @dataclass(frozen=True) above its class.",
            field="policy",
        )
    name = getattr(cls, "name", None)
    if not (isinstance(name, str) and name.isidentifier() and name != AUTO):
        raise InvalidArgumentError(
            f"policy {cls.__name__} has the name {name!r}; give its class a name of one word, such as name = "
            '"my_policy".',
            field="policy",
        )
    if name in policy_names() and policy_class(name) is not cls:
        raise InvalidArgumentError(
            f"policy {cls.__name__} has the name {name!r}, which another policy has; give its class another "
            "name.",
            field="policy",
        )


def _build(spec: Spec, options: Mapping[str, object]) -> CompressionPolicy:
    cls = policy_class(spec.name)
    given = named_arguments(spec, [field.name for field in _init_fields(cls)])
    if not _wraps(cls):
        for option in given.keys() & options.keys():
            raise InvalidArgumentError(f"policy {cls.name} is given the option {option!r} twice; keep one.")
        return cls(**_known_options(cls, {**given, **options}))
    inner = given.get(WRAPPED, getattr(cls, "default_inner", Wrapper.default_inner))
    return cls(**_known_options(cls, {**given, WRAPPED: _build(wrapped(cls.name, inner), options)}))


def _wraps(cls: type[CompressionPolicy]) -> bool:
    return any(field.name == WRAPPED for field in _init_fields(cls))


def _init_fields(cls: type[CompressionPolicy]) -> list[Field[object]]:
    return [field for field in fields(cls) if field.init]  # type: ignore[arg-type]


def _default(field: Field[object]) -> object:
    """MISSING where the option must be given."""
    return field.default if field.default_factory is MISSING else field.default_factory()


def _known_options(cls: type[CompressionPolicy], options: Mapping[str, object]) -> dict[str, object]:
    allowed = {field.name: field for field in _init_fields(cls)}
    refuse_unknown(cls.name, list(allowed), options)
    for name, field in allowed.items():
        if _default(field) is MISSING and name not in options:
            raise InvalidArgumentError(f"policy {cls.name} needs the option {name!r}; add it.")
    return dict(options)
