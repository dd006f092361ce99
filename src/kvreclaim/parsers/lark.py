"""Lark grammars for llguidance, of texts that may contain special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
"""White space between parts of JSON: enough to indent, but bounded."""
ANY = "(?s:.*)"


class Lark:
    """An unfinished grammar. Each method but `written` returns an expression for the body of a rule.

    special_tokens: ids of the special tokens, which no text contains, by name
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special = special_tokens
        names = sorted(special_tokens, key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        self._rules: dict[tuple[str, str], str] = {}

    def written(self, start: str) -> str:
        """Return the grammar that begins with this expression."""
        rules = [f"{name}{options}: {body}" for (body, options), name in self._rules.items()]
        return "\n".join(["%llguidance {}", f"start: {start}", *rules])

    def has(self, token: str) -> bool:
        """Whether the token is special."""
        return token in self._special

    def rule(self, *options: str) -> str:
        """Return a rule for one of these expressions."""
        return self._named(" | ".join(options), "r")

    def text(self, text: str) -> str:
        parts, place = [], 0
        for found in self._names.finditer(text):
            parts += [_quoted(text[place : found.start()]), f"<[{self._special[found[0]]}]>"]
            place = found.end()
        return " ".join(filter(None, [*parts, _quoted(text[place:])]))

    def matching(self, *regexes: str, but: str | None = None) -> str:
        """Match all these regular expressions, but not `but`."""
        wanted = [f"/{regex}/" for regex in regexes] + ([] if but is None else [f"~/{but}/"])
        return self._named(" & ".join(wanted), "T")

    def until(self, marker: str, *, but: str | None = None) -> str:
        """Free text up to and including the first marker. but: excluded texts"""
        found = self._names.search(marker)
        if found is None:
            return self._named(self.matching(ANY + escaped(marker), but=but), "r", "[lazy]")
        head, rest = marker[: found.start()], marker[found.end() :]
        before = (
            self.matching(ANY + escaped(head), but=but) if head else self.matching("(?s:.+)", but=but) + "?"
        )
        return f"{before} <[{self._special[found[0]]}]> {self.text(rest)}".rstrip()

    def json(self, schema: Mapping[str, Any]) -> str:
        """JSON by a schema."""
        spaced = {**schema, "x-guidance": {"whitespace_pattern": WHITE_SPACE}}
        return self._named(f"%json {json.dumps(spaced)}", "r")

    def shaped(self, template: str, **parts: str) -> str:
        """A text in which ~ is optional white space, and %name the part with this name."""
        space = self.matching(WHITE_SPACE) + "?"
        given = {f"%{name}": part for name, part in parts.items()} | {"~": space}
        pieces = re.split(rf"({'|'.join(given)})", template)
        return " ".join(filter(None, (given.get(piece, self.text(piece)) for piece in pieces)))

    def _named(self, body: str, sign: str, options: str = "") -> str:
        """Return a rule or terminal with this body, each made once."""
        return self._rules.setdefault((body, options), f"{sign}{len(self._rules)}")


def escaped(text: str) -> str:
    """Return a regular expression that matches only this text."""
    return re.sub(r"[\\.+*?()|\[\]{}^$/]", r"\\\g<0>", text).replace("\n", r"\n")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
