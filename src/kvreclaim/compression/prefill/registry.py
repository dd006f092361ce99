"""Registry of sparse-prefill methods by name. Third parties add theirs as entry
points of the group `kvreclaim.sparse_prefill` (name = "package.module:Class")."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType

from kvreclaim.checks import require
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.compression.prefill.minference import AShape, BlockSparse, VerticalSlash
from kvreclaim.compression.prefill.per_head import MInference
from kvreclaim.compression.prefill.pooled import Pooled
from kvreclaim.compression.spec.grammar import Spec, Value, parse_spec
from kvreclaim.config import DENSE
from kvreclaim.entry_points import find, names
from kvreclaim.errors import InvalidArgumentError

ENTRY_POINT_GROUP = "kvreclaim.sparse_prefill"
_BUILT_IN: Mapping[str, type[SparsePrefill]] = MappingProxyType(
    {cls.name: cls for cls in (Pooled, AShape, VerticalSlash, BlockSparse, MInference)}
)


def method_names() -> tuple[str, ...]:
    """Built-in names, then those of third parties in alphabetical order."""
    return names(_BUILT_IN, ENTRY_POINT_GROUP)


def make_method(text: str) -> SparsePrefill | None:
    """Return the method that is written as name or name(option=value, ...); None for "dense".

    Raises: InvalidArgumentError for an unknown name, option or value.
    """
    spec = parse_spec(text, "sparse prefill")
    if spec.name == DENSE and not spec.args:
        return None
    cls = find(_BUILT_IN, ENTRY_POINT_GROUP, spec.name, "sparse prefill", SparsePrefill)
    if cls is None:
        raise InvalidArgumentError(
            f"sparse prefill {spec.name!r} is unknown; known are {', '.join((DENSE, *method_names()))}."
        )
    options = [field.name for field in fields(cls) if field.init]
    given: dict[str, Value] = {}
    for name, value in spec.args:
        require(
            name in options and not isinstance(value, Spec),
            f"sparse prefill {spec.name} is given {value if name is None else name!r}; its options, each "
            f"written option=value, are {', '.join(options)}.",
        )
        assert name is not None
        require(name not in given, f"sparse prefill {spec.name} is given {name!r} twice; keep one.")
        given[name] = value
    return cls(**given)  # type: ignore[arg-type]
