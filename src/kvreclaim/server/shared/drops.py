"""Texts that the client drops from a conversation: kv_drop of messages and blocks, in both dialects."""

from __future__ import annotations

import re
import secrets
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BeforeValidator

from kvreclaim.engine.features.drops.feature import DroppedSpans
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import described
from kvreclaim.server.shared.service import Service

KVDrop = Annotated[
    Literal["lossy", "exact"] | None,
    BeforeValidator(
        lambda given: {True: "lossy", False: None}[given] if isinstance(given, bool) else given,
        json_schema_input_type=Literal["lossy", "exact"] | bool | None,
    ),
    described('"lossy" (or true) or "exact"'),
]


def check_place(drop: str | None, text: str, field_name: str, *, is_system: bool, is_last: bool) -> None:
    """Raises: ApiError for a text that cannot be dropped. is_last: nothing follows it"""
    if drop is None:
        return
    problem = None
    if is_system:
        problem = "system prompts and tools stay; remove it"
    elif is_last:
        problem = "nothing follows this message yet; drop it in a later turn"
    elif not text.strip():
        problem = "there is no text to drop; remove it"
    if problem is not None:
        raise ApiError(400, f"{field_name} is {drop!r}, but {problem}.", field_name)


@dataclass(slots=True)
class DropMarks:
    """Marks in a second rendering of the prompt, which locate texts.

    places: of the dropped texts, for errors
    """

    places: list[str] = field(default_factory=list)
    _edge: str = field(default_factory=lambda: f"x{secrets.token_hex(12)}x")
    _point: str = field(default_factory=lambda: f"y{secrets.token_hex(12)}y")

    def around(self, text: str, place: str) -> str:
        """Mark a dropped text, excluding surrounding white space, which templates may strip."""
        self.places.append(place)
        inner = text.strip()
        before, after = text.split(inner, 1)
        return f"{before}{self._edge}{inner}{self._edge}{after}"

    def before(self, text: str) -> str:
        """Mark the first text that the previous turn did not have: dropped texts leave the cache before it,
        or after the last dropped text."""
        inner = text.lstrip()
        return f"{text[: len(text) - len(inner)]}{self._point}{inner}"

    def read(self, text: str, marked: str, service: Service) -> tuple[list[int], DroppedSpans]:
        """Return the prompt's tokens, and the dropped ones. text: the prompt; marked: the prompt with marks.

        Raises: ApiError if the template has changed more than the marks.
        """
        edges: list[int] = []
        points: list[int] = []
        num_chars, bare = 0, []
        for piece in re.split(f"({self._edge}|{self._point})", marked):
            if piece in (self._edge, self._point):
                (edges if piece == self._edge else points).append(num_chars)
            else:
                bare.append(piece)
                num_chars += len(piece)
        if "".join(bare) != text or len(points) != 1 or len(edges) != 2 * len(self.places):
            place = self.places[0]
            raise ApiError(
                400,
                f"{place} is 'lossy', but this model's chat template does not leave the text of messages as "
                "it is, so its tokens are unknown; write 'exact', or leave it out.",
                place,
            )
        assert service.plain is not None, "a model without tokenizer is refused"
        ids, ends = service.plain.encode_with_ends(text)
        spans = tuple(
            (bisect_left(ends, start) + 1 if start else 0, bisect_right(ends, end))
            for start, end in zip(edges[::2], edges[1::2], strict=True)
        )
        found = tuple((start, end) for start, end in spans if start < end)
        at = max(bisect_right(ends, points[0]), *(end for _, end in found), 1)
        return ids, DroppedSpans(found, min(at, len(ids) - 1))
