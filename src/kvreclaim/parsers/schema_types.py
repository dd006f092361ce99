"""JSON types that a schema allows, with $ref, allOf, anyOf and oneOf followed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

ALL = frozenset({"string", "integer", "number", "boolean", "object", "array", "null"})
_ANY_OF = ("anyOf", "oneOf")


class SchemaTypes:
    """Schemas within one document. Each is read once, so that references may lead in circles.

    root: the document, which references are relative to
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[int, frozenset[str] | None] = {}

    def types(self, schema: Any) -> frozenset[str]:
        """Return the allowed types; a string where the schema restricts nothing that is understood."""
        return self._types(schema) or frozenset({"string"})

    def restricts(self, schema: Any) -> bool:
        """Whether the schema restricts types."""
        return bool(self._types(schema))

    def fits(self, value: Any, schema: Any) -> bool:
        """Whether the schema's types and listed values allow this value."""
        return self._fits(value, schema, set())

    def argument(self, key: str) -> Mapping[str, Any]:
        """Return the schema of an argument of the function that the document describes."""
        found = self._argument(self._root, key, set())
        return found[0] if len(found) == 1 else {"allOf": found} if found else {}

    def flat(self, schema: Mapping[str, Any], notes: frozenset[str]) -> Mapping[str, Any]:
        """Return the schema merged with $ref and allOf; unchanged if two of these restrict the same keyword.
        notes: keywords without restrictions"""
        parts = list(self._conjuncts(schema, set()))
        flat: dict[str, Any] = {}
        for part in parts:
            for keyword, value in part.items():
                if keyword in notes or keyword in ("$ref", "allOf"):
                    continue
                if flat.setdefault(keyword, value) != value:
                    return schema
        return flat

    def _conjuncts(self, schema: Any, seen: set[int]) -> Iterator[Mapping[str, Any]]:
        """The schema, and all that it includes by $ref and allOf."""
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return
        seen.add(id(schema))
        yield schema
        if "$ref" in schema:
            yield from self._conjuncts(self._target(schema["$ref"]), seen)
        for each in _listed(schema, "allOf"):
            yield from self._conjuncts(each, seen)

    def _types(self, schema: Any) -> frozenset[str] | None:
        """Return the allowed types; None: unrestricted."""
        if not isinstance(schema, Mapping):
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = None  # while a cycle leads here
            self._known[id(schema)] = self._read_types(schema)
        return self._known[id(schema)]

    def _read_types(self, schema: Mapping[str, Any]) -> frozenset[str] | None:
        found: list[frozenset[str] | None] = [_named(schema.get("type")), _types_of_values(schema)]
        if "$ref" in schema:
            target = self._target(schema["$ref"])
            found.append(ALL if target is None else self._types(target))
        found += [self._types(each) for each in _listed(schema, "allOf")]
        for keyword in _ANY_OF:
            options = [self.types(each) for each in _listed(schema, keyword) if each is not False]
            found.append(frozenset().union(*options) if options else None)
        restricted = [each for each in found if each is not None]
        if not restricted and not schema.keys().isdisjoint(("properties", "items")):
            return ALL
        return frozenset.intersection(*restricted) if restricted else None

    def _fits(self, value: Any, schema: Any, seen: set[int]) -> bool:
        if not isinstance(schema, Mapping) or id(schema) in seen:
            return schema is not False
        seen.add(id(schema))
        types, values = _named(schema.get("type")), _values(schema)
        if types is not None and types.isdisjoint(_types_of(value)):
            return False
        if values is not None and not any(_equal(value, each) for each in values):
            return False
        if "$ref" in schema and not self._fits(value, self._target(schema["$ref"]), seen):
            return False
        if not all(self._fits(value, each, seen) for each in _listed(schema, "allOf")):
            return False
        return all(
            any(self._fits(value, each, set(seen)) for each in options)
            for options in (_listed(schema, keyword) for keyword in _ANY_OF)
            if options
        )

    def _argument(self, schema: Any, key: str, seen: set[int]) -> list[Mapping[str, Any]]:
        """Schemas that the argument must all fit."""
        found: list[Mapping[str, Any]] = []
        for part in self._conjuncts(schema, seen):
            named = part.get("properties")
            own = named.get(key) if isinstance(named, Mapping) else None
            own = part.get("additionalProperties") if own is None else own
            if isinstance(own, Mapping):
                found.append(own)
            for keyword in _ANY_OF:
                options = [self._argument(each, key, seen) for each in _listed(part, keyword)]
                if given := [{"allOf": option} for option in options if option]:
                    found.append({"anyOf": given})
        return found

    def _target(self, reference: Any) -> Any:
        """Resolve a reference within the document; None: no target."""
        if not isinstance(reference, str) or not reference.startswith("#"):
            return None
        found = self._root
        for step in filter(None, reference[1:].split("/")):
            name = unquote(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping):
                found = found.get(name)
            elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
                found = found[int(name)]
            else:
                return None
        return found


def _listed(schema: Mapping[str, Any], keyword: str) -> list[Any]:
    given = schema.get(keyword)
    return given if isinstance(given, list) else []


def _named(given: Any) -> frozenset[str] | None:
    """Types by the keyword `type`; a number may be an integer."""
    names = {each for each in (given if isinstance(given, list) else [given]) if isinstance(each, str)}
    found = frozenset(names | ({"integer"} if "number" in names else set()))
    return found or None


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the allowed values; None: any."""
    if "const" in schema:
        return [schema["const"]]
    given = schema.get("enum")
    return given if isinstance(given, list) else None


def _types_of_values(schema: Mapping[str, Any]) -> frozenset[str] | None:
    found: frozenset[str] = frozenset().union(*map(_types_of, _values(schema) or []))
    return found or None


def _types_of(value: Any) -> frozenset[str]:
    """Return the types of a value."""
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return frozenset({"integer", "number"})
    kinds = {float: "number", str: "string", dict: "object", list: "array", type(None): "null"}
    return frozenset({kinds[type(value)]} if type(value) in kinds else ())


def _equal(value: Any, other: Any) -> bool:
    """Whether two JSON values are equal; true is not 1."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)
