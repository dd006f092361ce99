"""Items of a conversation: as sent in requests, and as stored."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator

from kvreclaim.server.base.fields import MAX_BLOCKS, Fields, Listed, described, refusal
from kvreclaim.server.base.identity import ANSWER_PREFIXES
from kvreclaim.server.shared.drops import KVDrop

Item = dict[str, Any]
"""JSON of an item, with an id, a status, and texts in parts."""
PREFIXES: Mapping[str, str] = {
    "message": "msg_",
    "reasoning": "rs_",
    "function_call": "fc_",
    "function_call_output": "fco_",
}
RESPONSE_PREFIX = ANSWER_PREFIXES["/v1/responses"]
_OWN_ID = re.compile(r"[a-z]+_([0-9a-f]{32})_\d+")


def new_item(kind: str, status: str, own: str, **more: Any) -> Item:
    """own: makes the id unique"""
    return {"id": PREFIXES[kind] + own, "type": kind, "status": status, **more}


def response_of(item_id: str) -> str | None:
    """Return the id of the response that contains an item; None: not an id of an answer's item."""
    found = _OWN_ID.fullmatch(item_id)
    return found and f"{RESPONSE_PREFIX}{found[1]}"


class ItemText(Fields):
    """annotations and logprobs of an answer's text may be sent back; the model reads only the text."""

    type: Literal["input_text", "output_text"]
    text: str
    annotations: Listed[Any] | None = None
    logprobs: Listed[Any] | None = None


class ReasoningText(Fields):
    type: Literal["reasoning_text"]
    text: str


ItemContent = Annotated[
    str | Annotated[Listed[ItemText], Field(max_length=MAX_BLOCKS)],
    described(
        "text or a list of input_text or output_text parts; images, audio, files and refusals are not "
        "supported"
    ),
]


class InputItem(Fields):
    """id and status are stored; a call that is `incomplete` is not shown to the model again."""

    id: str | None = Field(None, min_length=1)
    status: Literal["in_progress", "completed", "incomplete"] | None = None

    def shown(self, kind: str, **more: Any) -> Item:
        """Return the item as it is stored and returned."""
        item = new_item(kind, self.status or "completed", uuid.uuid4().hex, **more)
        return item if self.id is None else {**item, "id": self.id}


class MessageItem(InputItem):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent

    def kept(self) -> Item:
        if self.role == "assistant":
            parts = _parts(self.content, "output_text", annotations=[], logprobs=[])
        else:
            parts = _parts(self.content, "input_text")
        return self.shown("message", role=self.role, content=parts)


class CallItem(InputItem):
    type: Literal["function_call"]
    call_id: str = Field(min_length=1)
    name: str
    arguments: str

    def kept(self) -> Item:
        return self.shown("function_call", call_id=self.call_id, name=self.name, arguments=self.arguments)


class CallOutputItem(InputItem):
    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1)
    output: ItemContent
    kv_drop: KVDrop = None

    def kept(self) -> Item:
        output = self.output if isinstance(self.output, str) else _parts(self.output, "input_text")
        item = self.shown("function_call_output", call_id=self.call_id, output=output)
        return item if self.kv_drop is None else {**item, "kv_drop": self.kv_drop}


class ReasoningItem(InputItem):
    type: Literal["reasoning"]
    content: Annotated[Listed[ReasoningText], Field(max_length=MAX_BLOCKS)] | None = None
    summary: Annotated[
        Annotated[Listed[Any], Field(max_length=0)],
        described("an empty list; summaries are no reasoning that the model can read"),
    ] = Field(default_factory=list)
    encrypted_content: Annotated[None, described("null; encrypted reasoning is not supported")] = None

    def kept(self) -> Item:
        parts = [part.model_dump() for part in self.content or ()]
        return self.shown("reasoning", summary=[], content=parts)


class ItemReference(Fields):
    """A reference to an item of a stored answer."""

    type: Literal["item_reference"]
    id: str = Field(min_length=1)

    def kept(self) -> Item:
        return self.model_dump()


AnyItem = MessageItem | CallItem | CallOutputItem | ReasoningItem | ItemReference
MODELS: Mapping[str, type[AnyItem]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": CallOutputItem,
    "reasoning": ReasoningItem,
    "item_reference": ItemReference,
}


def _kept(value: Any) -> Item:
    """Return the request's item as it is stored."""
    kind = value.get("type") or "message" if isinstance(value, dict) else None
    if not isinstance(kind, str) or kind not in MODELS:
        known = ", ".join(MODELS)
        raise refusal(f"it must be an object of type {known}; send other items' content as one of these")
    return MODELS[kind].model_validate(value).kept()


def _as_items(value: Any) -> Any:
    """Read a text as a user message."""
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


Items = Annotated[
    Annotated[
        Listed[Annotated[Item, PlainValidator(_kept, json_schema_input_type=AnyItem)]], Field(min_length=1)
    ],
    BeforeValidator(_as_items, json_schema_input_type=str | list[AnyItem]),
]


def _parts(content: str | list[ItemText], kind: str, **more: Any) -> list[dict[str, Any]]:
    texts = [content] if isinstance(content, str) else [part.text for part in content]
    return [{"type": kind, "text": text, **more} for text in texts]
