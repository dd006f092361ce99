"""Check that the installed vLLM has the names, parameters and defaults that our code was written against."""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

from kvreclaim.errors import UnsupportedVllmError
from kvreclaim.integrations.vllm.settings.family import supported
from kvreclaim.integrations.vllm.settings.patching import original_of

ANY = "…"
_STARS: dict[inspect._ParameterKind, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that is wrapped, overridden or called.

    where:      module and qualified name, a colon between them
    parameters: as in a def, without annotations; a default of … is not compared
    digest:     of the source that our code was written against; only reported, see `check`
    """

    where: str
    parameters: str
    digest: str

    def difference(self, owner: type | None = None) -> str | None:
        """The difference, or None. owner: look there instead, at a class that may override it."""
        where = self.where
        try:
            if owner is None:
                found = parameters_of(find(where))
            else:
                name = where.rpartition(".")[2]
                where = f"{owner.__module__}:{owner.__qualname__}.{name}"
                found = parameters_of(getattr(owner, name))
        except (ImportError, AttributeError) as error:
            return f"{where} is missing ({error})"
        return (
            None if _same(found, self.parameters) else f"{where} is ({found}), expected ({self.parameters})"
        )


@dataclass(frozen=True, slots=True)
class Names:
    """Fields, properties or methods that a class must have."""

    where: str
    names: str

    def difference(self) -> str | None:
        """The missing name, or None."""
        try:
            owner = find(self.where)
        except (ImportError, AttributeError) as error:
            return f"{self.where} is missing ({error})"
        missing = [name for name in self.names.split() if not _declares(owner, name)]
        return f"{self.where} has no {', '.join(missing)}" if missing else None


def read_table(*texts: str) -> dict[str, tuple[Function | Names, ...]]:
    """Rows by [section]: `module:function(parameters) #digest`, `module:class has names`; # a comment.

    texts: a table, and changes to it: rows that replace or add, and `- module:name` for a row that is gone
    """
    sections: dict[str, dict[tuple[type, str], Function | Names]] = {}
    for line in (line for text in texts for line in text.splitlines()):
        if line.startswith("["):
            rows = sections.setdefault(line.strip("[]"), {})
        elif line.startswith("- "):
            for kind in (Function, Names):
                rows.pop((kind, line[2:]), None)
        elif line and not line.startswith("#"):
            row = _read(line)
            rows[type(row), row.where] = row
    return {name: tuple(rows.values()) for name, rows in sections.items()}


def _read(line: str) -> Function | Names:
    if " has " in line:
        return Names(*line.split(" has "))
    where, rest = line.split("(", 1)
    return Function(where, *rest.rsplit(") #", 1))


def check(rows: Iterable[Function | Names]) -> None:
    """Raises: UnsupportedVllmError with every difference."""
    refuse(row.difference() for row in rows)


def check_overrides(kind: type, rows: Iterable[Function | Names]) -> None:
    """The rows' methods as kind, a subclass, has them. Raises: UnsupportedVllmError."""
    owners = {base.__qualname__ for base in kind.__mro__}
    functions = (row for row in rows if isinstance(row, Function))
    refuse(
        row.difference(kind) for row in functions if row.where.partition(":")[2].partition(".")[0] in owners
    )


def refuse(differences: Iterable[str | None]) -> None:
    """Raises: UnsupportedVllmError if there is any."""
    import vllm

    found = [difference for difference in differences if difference is not None]
    if found:
        raise UnsupportedVllmError(
            f"kvreclaim {version('kvreclaim')} cannot take over vLLM {vllm.__version__}: {'; '.join(found)}. "
            f"Written for {supported()}; install one of these, or leave kv_compression out "
            "(docs/vllm.md says how to port it)."
        )


def find(where: str) -> Any:
    """The object of 'package.module:Class.name'. Raises: ImportError, AttributeError."""
    module, _, path = where.partition(":")
    found: Any = import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    return found


def parameters_of(function: Any) -> str:
    """The parameters as in a def, without annotations."""
    return ", ".join(_tokens(inspect.signature(original_of(function))))


def digest_of(function: Any) -> str:
    """Digest of the function's source, our own wrapper taken off."""
    source = inspect.getsource(inspect.unwrap(original_of(function)))
    return hashlib.sha256(source.encode()).hexdigest()[:12]


def _tokens(signature: inspect.Signature) -> Iterator[str]:
    starred = False
    for one in signature.parameters.values():
        if one.kind is inspect.Parameter.KEYWORD_ONLY and not starred:
            yield "*"
        starred = starred or one.kind in (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_POSITIONAL)
        default = "" if one.default is inspect.Parameter.empty else f"={one.default!r}"
        positional_only = "/" if one.kind is inspect.Parameter.POSITIONAL_ONLY else ""
        yield _STARS.get(one.kind, "") + one.name + positional_only + default


def _same(found: str, expected: str) -> bool:
    if ANY not in expected:
        return found == expected
    got, want = found.split(", "), expected.split(", ")
    return len(got) == len(want) and all(
        g == w or (w.endswith(f"={ANY}") and g.partition("=")[0] == w.partition("=")[0])
        for g, w in zip(got, want, strict=True)
    )


def _declares(owner: Any, name: str) -> bool:
    """A field, an annotation, a method, a property, or an attribute that a method sets."""
    fields = (*getattr(owner, "__dataclass_fields__", ()), *getattr(owner, "__struct_fields__", ()))
    if name in fields or hasattr(owner, name):
        return True
    setting = re.compile(rf"self\.{name}\b[^=(]*=[^=]")
    own = [base for base in owner.__mro__ if base.__module__.startswith("vllm")]
    return any(name in vars(base).get("__annotations__", {}) or setting.search(_source(base)) for base in own)


def _source(cls: type) -> str:
    """The text of a class: cut out of its module, as parsing vLLM's largest ones takes seconds."""
    text = inspect.getsource(sys.modules[cls.__module__])
    head = re.search(rf"^class {cls.__name__}\b.*(?:\n(?:[ )].*)?)*", text, re.MULTILINE)
    return head.group() if head else ""
