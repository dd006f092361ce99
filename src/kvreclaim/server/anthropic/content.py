"""Content blocks of an answer, whole or as events."""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from typing import Any

from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.serving.core import OutputDelta
from kvreclaim.parsers.json_value import json_so_far, json_value
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text, ToolCall, merged
from kvreclaim.server.http.events import event


def content_blocks(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    return [_block(part) for part in merged(pieces)]


class BlockEvents:
    """Content blocks as events: each block starts, is filled and stops before the next one."""

    def __init__(self) -> None:
        self._index = 0
        self._open: type[Piece] | None = None

    def write(self, pieces: Iterable[Piece]) -> list[bytes]:
        events: list[bytes] = []
        for piece in pieces:
            match piece:
                case Text(text):
                    events += self._begin(Text, {"type": "text", "text": ""})
                    events.append(self._delta({"type": "text_delta", "text": text}))
                case Reasoning(text):
                    events += self._begin(Reasoning, _block(Reasoning("")))
                    events.append(self._delta({"type": "thinking_delta", "thinking": text}))
                case CallBegin(name, call_id):
                    events += [*self.end(), *self._begin(CallBegin, _block(ToolCall(name, "{}", call_id)))]
                case Arguments(text):
                    events.append(self._delta({"type": "input_json_delta", "partial_json": text}))
                case CallEnd():
                    events += self.end()
        return events

    def end(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        self._index += 1
        return [_block_event("content_block_stop", self._index - 1)]

    def _begin(self, kind: type[Piece], block: dict[str, Any]) -> list[bytes]:
        """Start a block, unless one of this kind is open."""
        if self._open is kind:
            return []
        ended = self.end()
        self._open = kind
        return [*ended, _block_event("content_block_start", self._index, content_block=block)]

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _block_event("content_block_delta", self._index, delta=delta)


def stop_of(
    delta: OutputDelta, metrics: RequestMetrics, max_tokens: int, num_calls: int
) -> dict[str, str | None]:
    """Reason for which an output ended.

    A server that shuts down pauses the turn: the client sends it back, and another server continues it.
    """
    sequence = delta.stop_reason if isinstance(delta.stop_reason, str) else None
    if sequence is not None:
        reason = "stop_sequence"
    elif delta.finish_reason == "length":
        full = metrics.num_generated_tokens < max_tokens
        reason = "model_context_window_exceeded" if full else "max_tokens"
    elif delta.finish_reason == "abort":
        reason = "pause_turn"
    else:
        reason = "tool_use" if num_calls else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _block(part: Text | Reasoning | ToolCall) -> dict[str, Any]:
    """signature: empty, because it is never verified"""
    match part:
        case Text(text):
            return {"type": "text", "text": text}
        case Reasoning(text):
            return {"type": "thinking", "thinking": text, "signature": ""}
        case ToolCall(name, arguments, call_id):
            made = call_id or f"toolu_{uuid.uuid4().hex}"
            given = json_so_far(arguments) if part.is_cut else json_value(arguments)
            return {"type": "tool_use", "id": made, "name": name, "input": given}


def _block_event(name: str, index: int, **more: Any) -> bytes:
    return event({"type": name, "index": index, **more}, name)
