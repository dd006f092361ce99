"""An answer's content blocks, whole or as events."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable
from typing import Any

from kvreclaim.engine.api.tool_calls import Piece, ToolCall
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.serving.stream import OutputDelta
from kvreclaim.server.events import event


def content_blocks(pieces: Iterable[Piece]) -> list[dict[str, Any]]:
    """The blocks of a whole answer; text that was cut in pieces is one block."""
    blocks: list[dict[str, Any]] = []
    for piece in pieces:
        if isinstance(piece, ToolCall):
            blocks.append(_tool_use(piece, json.loads(piece.arguments)))
        elif blocks and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += piece
        else:
            blocks.append({"type": "text", "text": piece})
    return blocks


class BlockEvents:
    """The same as events: each block is begun, filled and ended before the next one."""

    def __init__(self) -> None:
        self._index = 0
        self._in_text = False

    def write(self, pieces: Iterable[Piece]) -> list[bytes]:
        events: list[bytes] = []
        for piece in pieces:
            if isinstance(piece, ToolCall):
                events += self.end()
                events.append(self._start(_tool_use(piece, {})))
                events.append(self._delta({"type": "input_json_delta", "partial_json": piece.arguments}))
                events.append(self._stop())
                continue
            if not self._in_text:
                self._in_text = True
                events.append(self._start({"type": "text", "text": ""}))
            events.append(self._delta({"type": "text_delta", "text": piece}))
        return events

    def end(self) -> list[bytes]:
        """End the block that is open, if one is."""
        if not self._in_text:
            return []
        self._in_text = False
        return [self._stop()]

    def _start(self, block: dict[str, Any]) -> bytes:
        return _block_event("content_block_start", self._index, content_block=block)

    def _delta(self, delta: dict[str, str]) -> bytes:
        return _block_event("content_block_delta", self._index, delta=delta)

    def _stop(self) -> bytes:
        self._index += 1
        return _block_event("content_block_stop", self._index - 1)


def stop_of(
    delta: OutputDelta, metrics: RequestMetrics, max_tokens: int, num_calls: int
) -> dict[str, str | None]:
    """Why an output ended.

    A server that shuts down pauses the turn: sent back as it is, another server goes on with it.
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


def _tool_use(call: ToolCall, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name, "input": arguments}


def _block_event(name: str, index: int, **more: Any) -> bytes:
    return event({"type": name, "index": index, **more}, name)
