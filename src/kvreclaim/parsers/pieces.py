"""Parts of an output: text, reasoning, and tool calls with streamed arguments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """A call begins; id: the model's own, where its format has one."""

    name: str
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments; all parts together are the JSON text of an object."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete, or was broken off.

    broken: then all of it as the model wrote it; the rest comes as text
    is_cut: the output ends within the call, which is correct so far
    """

    broken: str | None = None
    is_cut: bool = False


Piece = Text | Reasoning | CallBegin | Arguments | CallEnd


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a function.

    arguments: the JSON text of an object
    is_cut:    the output ends within the call; then it is the beginning of such a text, or empty
    """

    name: str
    arguments: str
    id: str | None = None
    is_cut: bool = False


def merged(pieces: Iterable[Piece], *, cut_as_text: bool = False) -> list[Text | Reasoning | ToolCall]:
    """Join the pieces of a whole output. A call with invalid JSON is text.

    cut_as_text: a call within which the output ends is text, too
    """
    found: list[Text | Reasoning | ToolCall] = []
    begun: CallBegin | None = None
    parts: list[str] = []

    def add(piece: Text | Reasoning) -> None:
        last = found[-1] if found else None
        if type(last) is type(piece):
            found[-1] = type(piece)(last.text + piece.text)
        elif piece.text:
            found.append(piece)

    for piece in pieces:
        match piece:
            case CallBegin():
                begun, parts = piece, []
            case Arguments(text):
                parts.append(text)
            case CallEnd(broken, is_cut) if broken is None or (is_cut and not cut_as_text):
                assert begun is not None, "a call ends that has begun"
                found.append(ToolCall(begun.name, "".join(parts), begun.id, is_cut))
            case CallEnd(broken):
                add(Text(broken or ""))
            case Text() | Reasoning():
                add(piece)
    return found
