"""Pieces of an output as the assistant's message: whole, or as the deltas of chunks."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, ToolCall, merged

REASONING = ("reasoning_content", "reasoning")
"""Names of the reasoning: most clients read the first, vLLM writes the second."""


def whole_message(pieces: Iterable[Piece]) -> dict[str, Any]:
    """content is null if there are only calls; empty reasoning_content, reasoning and tool_calls are
    omitted."""
    parts = merged(pieces)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    reasoning = "".join(part.text for part in parts if isinstance(part, Reasoning))
    calls = [_call(part.id, part.name, part.arguments) for part in parts if isinstance(part, ToolCall)]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if reasoning:
        message |= dict.fromkeys(REASONING, reasoning)
    if calls:
        message["tool_calls"] = calls
    return message


class MessageChunks:
    """Deltas of one output: a call's first one has its id and name, all have a part of its arguments."""

    def __init__(self) -> None:
        self._num_begun = 0

    def write(self, pieces: Iterable[Piece]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    self._add(deltas, "content", text)
                case Reasoning(text):
                    self._add(deltas, REASONING[0], text)
                case CallBegin(name, call_id):
                    self._num_begun += 1
                    self._add_call(deltas, _call(call_id, name, ""))
                case Arguments(text):
                    self._add_call(deltas, {"function": {"arguments": text}})
                case CallEnd():
                    pass
        for delta in deltas:
            if REASONING[0] in delta:
                delta |= dict.fromkeys(REASONING, delta[REASONING[0]])
        return deltas

    def _add(self, deltas: list[dict[str, Any]], field: str, text: str) -> None:
        if deltas and field in deltas[-1]:
            deltas[-1][field] += text
        else:
            deltas.append({field: text})

    def _add_call(self, deltas: list[dict[str, Any]], part: dict[str, Any]) -> None:
        if not (deltas and "tool_calls" in deltas[-1]):
            deltas.append({"tool_calls": []})
        calls = deltas[-1]["tool_calls"]
        index = self._num_begun - 1
        if calls and calls[-1]["index"] == index:
            calls[-1]["function"]["arguments"] += part["function"]["arguments"]
        else:
            calls.append({"index": index, **part})


def _call(call_id: str | None, name: str, arguments: str) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": call_id or f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
