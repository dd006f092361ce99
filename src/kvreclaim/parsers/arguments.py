"""A function's arguments as a grammar expression: as JSON, or as one tag each."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.endless import has_value
from kvreclaim.parsers.lark import ANY, Lark, escaped
from kvreclaim.parsers.schema_size import MAX_PROPERTIES, too_many
from kvreclaim.parsers.schema_types import SchemaTypes


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_schema, value))


def _are_named_schemas(value: Any) -> bool:
    return isinstance(value, Mapping) and all(map(_is_schema, value.values()))


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_type(value: Any) -> bool:
    return _is_text(value) or _are_texts(value)


SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_is_type, "a type's name or a list of such names"),
    "enum": (lambda value: isinstance(value, list), "a list of values"),
    "required": (_are_texts, "a list of names"),
    "additionalProperties": (_is_schema, "true, false or a schema"),
    "pattern": (_is_text, "a regular expression"),
    "$ref": (_is_text, "a text"),
    **dict.fromkeys(("properties", "$defs", "definitions"), (_are_named_schemas, "an object of schemas")),
    **dict.fromkeys(("anyOf", "oneOf"), (_are_schemas, "a list of schemas")),
    **dict.fromkeys(("minLength", "maxLength"), (_is_length, "an integer >= 0")),
}


def misshapen(schema: Mapping[str, Any]) -> str | None:
    """Describe the first of its own keywords that cannot be read; None: all can."""
    for keyword, (fits, wanted) in SHAPES.items():
        if keyword in schema and not fits(schema[keyword]):
            return f"has {keyword} {str(schema[keyword])[:80]!r}; pass {wanted}"
    return None


NOTES = frozenset({"title", "description", "default", "examples", "deprecated", "$comment"})
"""Keywords without restrictions."""
DEFINITIONS = ("$defs", "definitions")
OF_TAGS = NOTES | {"type", "properties", "required", "additionalProperties", "$schema", "$id", *DEFINITIONS}
"""Keywords of an object whose properties are tags."""
SPELLINGS = {r"\d": "[0-9]", r"\w": "[A-Za-z0-9_]", "/": r"\/"}
"""JSON schemas mean only ASCII digits and letters; a bare slash ends an expression."""


@dataclass(frozen=True, slots=True)
class Callee:
    """A function that may be called.

    parameters: the JSON schema of its arguments
    place:      location of this schema in the request
    """

    name: str
    parameters: Mapping[str, Any]
    place: str

    def __post_init__(self) -> None:
        if re.fullmatch(r"[\w.\-]{1,128}", self.name) is None:
            field = f"{self.place.rpartition('.')[0]}.name"
            raise InvalidArgumentError(
                f"{field} is {self.name[:80]!r}, but calls that follow a grammar need names of at most 128 "
                "letters, digits, _, . and -; rename it.",
                field=field,
            )
        self._check_shape()
        if self.parameters.get("type", "object") != "object":
            raise self.refusal("", f"has type {str(self.parameters['type'])!r}; pass an object's schema")
        if not has_value(self.parameters):
            raise self.refusal("", "cannot be followed: each value would contain another one; change it")
        if (count := too_many(dict(self.parameters))) is not None:
            raise self.refusal(
                "", f"has an object of {count} properties, at most {MAX_PROPERTIES} are followed"
            )

    def _check_shape(self) -> None:
        """Check the schema itself and each argument's, which formats read."""
        if (wrong := misshapen(self.parameters)) is not None:
            raise self.refusal("", wrong)
        for key, schema in self.parameters.get("properties", {}).items():
            if isinstance(schema, Mapping) and (wrong := misshapen(schema)) is not None:
                raise self.refusal(f".properties.{key}", wrong)

    def refusal(self, where: str, what: str) -> InvalidArgumentError:
        return InvalidArgumentError(f"{self.place}{where} {what}.", field=self.place)


@dataclass(frozen=True, slots=True)
class TagShape:
    """How an argument is written: the opening tag with %key, its value, the closing tag.

    lines: the value is on its own lines
    typed: the opening tag states in %string whether the value is text
    """

    opening: str
    close: str
    lines: bool = False
    typed: bool = False


def json_arguments(lark: Lark, function: Callee) -> str:
    return lark.json({"type": "object", **function.parameters})


def tag_arguments(lark: Lark, function: Callee, tags: TagShape) -> str:
    """Write the tags in the schema's order. Raises: InvalidArgumentError for other schemas."""
    return _Tags(lark, function, tags).written()


class _Tags:
    def __init__(self, lark: Lark, function: Callee, tags: TagShape) -> None:
        self.lark = lark
        self.function = function
        self.tags = tags
        self.schemas = SchemaTypes(function.parameters)
        self.definitions = {
            name: function.parameters[name] for name in DEFINITIONS if name in function.parameters
        }

    def written(self) -> str:
        schema = self.function.parameters
        if unknown := schema.keys() - OF_TAGS:
            raise self._refusal("", min(unknown))
        required, properties = schema.get("required", []), dict(schema.get("properties", {}))
        properties |= {key: {} for key in required if key not in properties}
        parts = [
            self._argument(key, each) + ("" if key in required else "?") for key, each in properties.items()
        ]
        more = schema.get("additionalProperties", True)
        if not properties and more is not False:
            name = self.lark.matching(r"[\w.\-]{1,64}")
            parts = [self._one("", name, {} if more is True else more) + "*"]
        return " ".join(parts)

    def _argument(self, key: str, schema: Any) -> str:
        if re.fullmatch(r'[^<>"\s](?:[^<>"]{0,126}[^<>"\s])?', key) is None:
            raise self.function.refusal("", f"has a property {key[:80]!r}, which no tag can hold; rename it")
        return self._one(f".properties.{key}", self.lark.text(key), schema)

    def _one(self, where: str, key: str, schema: Any) -> str:
        if schema is False:
            raise self._refusal(where, str(schema))
        schema, tags, lark = {} if schema is True else schema, self.tags, self.lark
        types, options = self.schemas.types(schema), []
        if types == {"string"}:
            schema = self.schemas.flat(schema, NOTES)
        if types == {"string"} or ("string" in types and _is_free(schema)):
            opening = lark.shaped(tags.opening, key=key, string=lark.text("true"))
            options.append(f"{opening} {self._text(where, schema)}")
        if types != {"string"} and (not options or tags.typed):
            opening = lark.shaped(tags.opening, key=key, string=lark.text("false"))
            self._check_references(where, schema)
            value = lark.json({**self.definitions, **schema})
            options.append(lark.shaped(f"%opening~%value~{tags.close}", opening=opening, value=value))
        return lark.rule(*options)

    def _text(self, where: str, schema: Mapping[str, Any]) -> str:
        """A value that is text, and the closing tag."""
        lark, close, line = self.lark, self.tags.close, "\n" if self.tags.lines else ""
        if _is_free(schema):
            return lark.until(close)
        given = schema.keys() - NOTES - {"type"}
        if given <= {"enum", "const"}:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            values = [value for value in values if isinstance(value, str)]
            if len(given) > 1 or not values or any(close in value for value in values):
                raise self._refusal(where, min(given))
            return lark.shaped(f"{line}%values{line}{close}", values=lark.rule(*map(lark.text, values)))
        if unknown := given - {"pattern", "minLength", "maxLength"}:
            raise self._refusal(where, min(unknown))
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        regexes = [rf"(?s:.{{{low},{high}}})"]
        if "pattern" in given:
            regexes.append(self._regex(where, str(schema["pattern"])))
        value = lark.matching(*regexes, but=f"{ANY}{escaped(close)}{ANY}")
        return lark.shaped(f"{line}%value{line}{close}", value=value)

    def _regex(self, where: str, pattern: str) -> str:
        """Return a regular expression for a whole text that contains the pattern."""
        begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)\$$", pattern) is not None
        inside = pattern[begins : len(pattern) - ends]
        if (begins or ends) and _has_options(inside):
            raise self._refusal(where, "pattern")
        inside = re.sub(r"\\.|/", lambda found: SPELLINGS.get(found[0], found[0]), inside)
        return f"{'' if begins else ANY}(?:{inside}){'' if ends else ANY}"

    def _check_references(self, where: str, schema: Any) -> None:
        """Check that references within a property's schema lead to definitions, which are kept with it."""
        if isinstance(schema, Mapping):
            target = schema.get("$ref")
            if isinstance(target, str) and not target.startswith(tuple(f"#/{name}/" for name in DEFINITIONS)):
                raise self._refusal(where, "$ref")
        inside = (
            schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
        )
        for each in inside:
            self._check_references(where, each)

    def _refusal(self, where: str, keyword: str) -> InvalidArgumentError:
        what = f"has {keyword[:80]!r}, which cannot be followed where arguments are tags; remove it"
        return self.function.refusal(where, what)


def _is_free(schema: Mapping[str, Any]) -> bool:
    """Whether only types restrict the schema, so that any text is allowed if text is."""
    given = schema.keys() - NOTES
    if given == {"anyOf"} and isinstance(schema["anyOf"], list):
        return all(isinstance(each, Mapping) and each.keys() - NOTES <= {"type"} for each in schema["anyOf"])
    return given <= {"type"}


def _has_options(regex: str) -> bool:
    """Whether there is a | outside of all brackets."""
    bare = re.sub(r"\\.", "", regex)
    bare = re.sub(r"\[[^\]]*\]", "", bare)
    while (less := re.sub(r"\([^()]*\)", "", bare)) != bare:
        bare = less
    return "|" in bare
