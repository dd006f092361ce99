"""Items as the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from kvreclaim.engine.api.chat import SYSTEM_ROLES
from kvreclaim.server.responses.items import Item

ChatMessage = dict[str, Any]


@dataclass(slots=True)
class ChatWriter:
    """Writes items as messages, in order; leading system and developer items form one message.

    Adjacent items of the assistant form one message, with reasoning before texts and texts before calls, as
    in chat. A second text starts a new message, and so does a text after calls, unless their results or
    further calls follow it: templates read results right after the message with the calls.

    places:   location of each message, for errors
    left_out: ids of incomplete calls, which are omitted together with their outputs
    """

    messages: list[ChatMessage] = field(default_factory=list)
    places: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def write(self, item: Item, place: str) -> None:
        """place: the item's location, for errors. Raises: ApiError."""
        match item["type"]:
            case "message" if item["role"] == "assistant":
                message = self._turn(place, lambda open_: not open_["content"] and "tool_calls" not in open_)
                message["content"] += _texts(item["content"])
            case "message":
                self.add_texts(item["role"], [part["text"] for part in item["content"]], place)
            case "reasoning":
                self._reason(item, place)
            case "function_call" if item["status"] == "incomplete":
                self.left_out.add(item["call_id"])
            case "function_call":
                self._call(item, place)
            case "function_call_output" if item["call_id"] not in self.left_out:
                self._rejoin()
                output = item["output"]
                content = output if isinstance(output, str) else _texts(output)
                drop = {"kv_drop": item["kv_drop"]} if "kv_drop" in item else {}
                self._add(
                    {"role": "tool", "tool_call_id": item["call_id"], "content": content, **drop}, place
                )

    def add_texts(self, role: str, texts: list[str], place: str) -> None:
        content = [{"type": "text", "text": text} for text in texts]
        leads = len(self.messages) == 1 and self.messages[0]["role"] in SYSTEM_ROLES
        if leads and role in SYSTEM_ROLES:
            self.messages[0]["content"] += content
        else:
            self._add({"role": role, "content": content}, place)

    def done(self) -> list[ChatMessage]:
        """Return the messages; call once, at the end."""
        for message in self.messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
        return self.messages

    def _reason(self, item: Item, place: str) -> None:
        texts = [part["text"] for part in item["content"]]
        if any(texts):
            fits = self._turn(place, lambda open_: not open_["content"] and "tool_calls" not in open_)
            fits.setdefault("reasoning_content", []).extend(texts)

    def _call(self, item: Item, place: str) -> None:
        self._rejoin()
        self.left_out.discard(item["call_id"])
        message = self._turn(place, lambda _: True)
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)

    def _rejoin(self) -> None:
        """Move texts after calls into the message of the calls."""
        calls = len(self.messages) - 1 - len(list(takewhile(_is_plain_text, reversed(self.messages))))
        if calls >= 0 and "tool_calls" in self.messages[calls]:
            for message in self.messages[calls + 1 :]:
                self.messages[calls]["content"] += message["content"]
            del self.messages[calls + 1 :], self.places[calls + 1 :]

    def _turn(self, place: str, fits: Any) -> ChatMessage:
        """Return the assistant's current message if it fits, or a new one."""
        last = self.messages[-1] if self.messages else None
        if last is None or last["role"] != "assistant" or not fits(last):
            last = self._add({"role": "assistant", "content": []}, place)
        return last

    def _add(self, message: ChatMessage, place: str) -> ChatMessage:
        self.messages.append(message)
        self.places.append(place)
        return message


def _is_plain_text(message: ChatMessage) -> bool:
    """Whether a message is assistant text and nothing else."""
    return message["role"] == "assistant" and message.keys() == {"role", "content"}


def _texts(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": part["text"]} for part in parts]


def num_chars(items: Iterable[Item]) -> int:
    """Count the characters of the items, including arguments and reasoning."""
    found = 0
    for item in items:
        content: Any = item.get("content", item.get("output", ()))
        found += len(content) if isinstance(content, str) else sum(len(part["text"]) for part in content)
        found += len(item.get("arguments", ""))
    return found
