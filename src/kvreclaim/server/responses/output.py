"""Pieces of an answer as output items and their events."""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text
from kvreclaim.server.responses.items import RESPONSE_PREFIX, Item, new_item
from kvreclaim.server.responses.token_roles import Logprobs

Event = dict[str, Any]


class OutputItems:
    """Writes pieces into items: each starts, is filled and ends before the next one.

    response_id: the answer's; part of its items' ids
    items:    finished items
    logprobs: of future texts, by the index of their message
    """

    def __init__(self, response_id: str) -> None:
        self._own = response_id.removeprefix(RESPONSE_PREFIX)
        self.items: list[Item] = []
        self._item: Item | None = None
        self.logprobs: defaultdict[int, Logprobs] = defaultdict(list)
        self._texts: list[str] = []
        self._logprobs: Logprobs = []
        self._num_messages = 0

    def write(self, pieces: Iterable[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            match piece:
                case Text(text) if text:
                    events += self._begin("message", role="assistant", content=[])
                    logprobs = self.logprobs.pop(self._num_messages - 1, [])
                    self._logprobs += logprobs
                    events.append(self._delta("output_text", text, content_index=0, logprobs=logprobs))
                case Reasoning(text) if text:
                    events += self._begin("reasoning", summary=[], content=[])
                    events.append(self._delta("reasoning_text", text, content_index=0))
                case CallBegin(name, call_id):
                    called = call_id or f"call_{uuid.uuid4().hex}"
                    events += self.end()
                    events += self._begin("function_call", call_id=called, name=name, arguments="")
                case Arguments(text):
                    events.append(self._delta("function_call_arguments", text))
                case CallEnd(broken):
                    events += self.end("completed" if broken is None else "incomplete")
        return events

    def end(self, status: str = "completed") -> list[Event]:
        item = self._item
        if item is None:
            return []
        text, self._item = "".join(self._texts), None
        item["status"] = status
        if item["type"] == "function_call":
            item["arguments"] = text
            events = [self._about(item, "function_call_arguments.done", arguments=text, name=item["name"])]
        else:
            part = item["content"][0] | {"text": text}
            logprobs = {}
            if item["type"] == "message":
                self._logprobs += self.logprobs.pop(self._num_messages - 1, [])
                part["logprobs"] = self._logprobs
                logprobs = {"logprobs": self._logprobs}
            item["content"] = [part]
            done = self._about(item, f"{part['type']}.done", content_index=0, text=text, **logprobs)
            events = [done, self._about(item, "content_part.done", content_index=0, part=part)]
        self.items.append(item)
        return [*events, self._of_item("output_item.done", item, len(self.items) - 1)]

    def end_all(self, *, complete: bool) -> list[Event]:
        """End the output, which has at least one item. complete: otherwise its last item is incomplete."""
        empty = not self.items and self._item is None
        events = self._begin("message", role="assistant", content=[]) if empty else []
        return events + self.end("completed" if complete else "incomplete")

    def _begin(self, kind: str, **more: Any) -> list[Event]:
        """Start an item, unless one of this kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return []
        ended = self.end()
        item = self._item = new_item(kind, "in_progress", f"{self._own}_{len(self.items)}", **more)
        self._texts = []
        events = [*ended, self._of_item("output_item.added", dict(item), len(self.items))]
        if kind != "function_call":
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if kind == "message":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                self._logprobs = []
                self._num_messages += 1
            item["content"] = [part]
            events.append(self._about(item, "content_part.added", content_index=0, part=part))
        return events

    def _delta(self, kind: str, text: str, **more: Any) -> Event:
        assert self._item is not None, f"a {kind} comes in an item"
        self._texts.append(text)
        return self._about(self._item, f"{kind}.delta", delta=text, **more)

    def _about(self, item: Item, kind: str, **more: Any) -> Event:
        return {"type": f"response.{kind}", "item_id": item["id"], "output_index": len(self.items), **more}

    def _of_item(self, kind: str, item: Item, index: int) -> Event:
        return {"type": f"response.{kind}", "output_index": index, "item": item}
