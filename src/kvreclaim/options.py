"""Settings as dataclass fields, with default, bounds and help.

Checks, the command line and the bodies of requests read it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from types import MappingProxyType, NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvreclaim.checks import check_bool, check_choice, check_int, check_number

KEY = "option"
FIRST, MODEL, MEMORY, COMPRESSION = "Options", "Model", "Memory", "Compression"
CACHING, OFFLOAD, SPECULATION = "Prefix caching", "Offload", "Speculation"
LIMITS, OBSERVABILITY = "Limits and scheduling", "Observability"
"""Panels of the help texts; FIRST is typer's own, which comes first."""
MAX_COUNT = (1 << 31) - 1
"""The largest count that fits an int32."""
LARGEST = (1 << 63) - 1
"""Greatest value of an int that declares none: more overflows what it is taken for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Metadata of a field.

    help:      a sentence; an option without one is not offered on command lines
    low, high: least and greatest value; an int may lack the greatest, which is LARGEST then
    unit:      stands behind an int's bound in a refusal
    choices:   the only values
    flags:     on command lines; the field's own name where empty
    panel:     of the help text; where empty, that of the config
    env:       a variable that may hold the value
    typed_as:  what a command line reads, where it is not the field's own type
    also:      additional texts that are values
    """

    help: str = ""
    low: float | None = None
    high: float | None = None
    unit: str = ""
    choices: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    panel: str = ""
    env: str | None = None
    typed_as: Any = None
    also: tuple[str, ...] = ()


def option(default: Any, help: str = "", *, kw_only: bool = False, **facts: Any) -> Any:
    """A dataclass field with this default. facts: of Option."""
    named: dict[str, Any] = {"kw_only": True} if kw_only else {}
    return field(default=default, metadata={KEY: Option(help=help, **facts)}, **named)


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a config as its declaration has it. type: without None; optional: None is a value."""

    name: str
    type: Any
    optional: bool
    default: Any
    spec: Option

    def check(self, value: object, label: str) -> None:
        """Raises: InvalidArgumentError about `label` unless value is of the type and within the bounds."""
        spec = self.spec
        low, high = spec.low, spec.high
        if (value is None and self.optional) or (isinstance(value, str) and value in spec.also):
            return
        choices = spec.choices or (get_args(self.type) if get_origin(self.type) is Literal else ())
        if choices:
            check_choice(label, value, choices)
        elif self.type is bool:
            check_bool(label, value)
        elif self.type is int:
            assert low is not None, f"{self.name} is an int without a least value"
            check_int(label, value, int(low), spec.unit, maximum=LARGEST if high is None else int(high))
        elif self.type is float:
            assert low is not None, f"{self.name} is a float without a least value"
            assert high is not None, f"{self.name} is a float without a greatest value"
            check_number(label, value, low, high)


@cache
def settings_of(config: type) -> Mapping[str, Setting]:
    """Return the options of a dataclass, by name."""
    own = [each for each in fields(config) if KEY in each.metadata]
    hints = get_type_hints(config) if own else {}
    found = {}
    for each in own:
        kinds = get_args(hints[each.name])
        left = [kind for kind in kinds if kind is not NoneType]
        optional = len(left) < len(kinds)
        kind = left[0] if optional and len(left) == 1 else hints[each.name]
        found[each.name] = Setting(each.name, kind, optional, each.default, each.metadata[KEY])
    return MappingProxyType(found)


def check_options(config: object, label: str = "{}") -> None:
    """Every option of a dataclass's object. Raises: InvalidArgumentError for the first that is wrong.

    label: name in errors, with the field's name for {}
    """
    own: Any = type(config)
    for setting in settings_of(own).values():
        setting.check(getattr(config, setting.name), label.format(setting.name))
