"""Translates a conversation in Anthropic's blocks to the messages and tools that chat templates read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from kvreclaim.engine.api.chat import PLACEHOLDER
from kvreclaim.server.anthropic.fields import (
    AnthropicTool,
    AnyBlock,
    Block,
    ConversationFields,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.shared.drops import DropMarks, check_place
from kvreclaim.server.shared.tool_prompt import broken_call

ALTERED = "\ue000"
"""Prefix of altered pieces; a character of no script."""

TemplateMessage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """A cache_control after the first `place` pieces of the conversation."""

    place: int
    ttl: str
    where: str


@dataclass(slots=True)
class Writer:
    """Translates a conversation, piece by piece in the order tools, system, messages.

    A piece is a tool, a block, or a text within a tool result. intact: pieces after this many are altered, so
    that a rendering shows where they begin to matter; None alters none. drops: marks dropped texts, and the
    first block `new` that the previous turn did not have.
    """

    body: ConversationFields
    intact: int | None = None
    place: int = 0
    marks: list[Mark] = field(default_factory=list)
    drops: DropMarks | None = None
    new: str = ""

    def tools(self) -> list[dict[str, Any]]:
        tools = list(enumerate(self.body.tools or []))
        if self.body.tool_choice is not None and self.body.tool_choice.type == "none":
            for i, tool in tools:
                self._mark(tool, f"tools.{i}")
            return []
        return [self._tool(tool, f"tools.{i}") for i, tool in tools]

    def messages(self) -> list[TemplateMessage]:
        """Call after tools(). Adjacent messages of one role are merged. Raises: ApiError."""
        written: list[TemplateMessage] = []
        if self.body.system is not None:
            texts = [self._text(block, f"system.{i}") for i, block in enumerate(self.body.system)]
            written.append({"role": "system", "content": "\n".join(texts)})
        names: dict[str, str] = {}
        for role, located in groupby(_blocks_of(self.body), key=lambda item: item[0]):
            for kind, same in groupby(located, key=lambda item: item[2].type):
                written += self._run(role, kind, [(where, block) for _, where, block in same], names)
        return list(_joined(written))

    def _run(
        self, role: str, kind: str, located: list[tuple[str, AnyBlock]], names: dict[str, str]
    ) -> list[TemplateMessage]:
        """Translate consecutive blocks of one kind."""
        if kind == "text":
            blocks = [(where, block) for where, block in located if isinstance(block, TextBlock)]
            texts = [self._dropped(self._text(block, where), block, where) for where, block in blocks]
            return [{"role": role, "content": "\n".join(texts)}]
        if kind == "thinking":
            thoughts = [self._thought(block, where) for where, block in located if block.type == "thinking"]
            return [{"role": role, "content": "", "reasoning_content": "\n".join(thoughts)}]
        if kind == "tool_use":
            uses = [(where, block) for where, block in located if isinstance(block, ToolUseBlock)]
            names |= {block.id: block.name for _, block in uses}
            first = self.intact is not None and self.place >= self.intact
            text, calls = ALTERED if first else "", []
            for where, block in uses:
                name, arguments = self._piece(block.name), block.arguments
                self._mark(block, where)
                if arguments is None:
                    text += "\n" + broken_call(name, str(block.input))
                else:
                    function = {"name": name, "arguments": arguments}
                    calls.append({"id": block.id, "type": "function", "function": function})
            called = {"tool_calls": calls} if calls else {}
            return [{"role": role, "content": text, **called}]
        results = [(where, block) for where, block in located if isinstance(block, ToolResultBlock)]
        return [self._result(block, where, names) for where, block in results]

    def _tool(self, tool: AnthropicTool, where: str) -> dict[str, Any]:
        function: dict[str, Any] = {"name": self._piece(tool.name)}
        if tool.description is not None:
            function["description"] = self._same(tool.description)
        function["parameters"] = tool.input_schema
        self._mark(tool, where)
        return {"type": "function", "function": function}

    def _text(self, block: TextBlock, where: str) -> str:
        text = self._piece(block.text)
        self._mark(block, where)
        return text

    def _thought(self, block: ThinkingBlock, where: str) -> str:
        text = self._piece(block.thinking)
        self._mark(block, where)
        return text

    def _result(self, block: ToolResultBlock, where: str, names: dict[str, str]) -> TemplateMessage:
        lead = "Error: " if block.is_error else ""
        texts = [self._text(part, f"{where}.content.{i}") for i, part in enumerate(block.content)]
        if not texts:
            texts = [self._piece("")]
        self._mark(block, where)
        name = names.get(block.tool_use_id)
        if name is None:
            raise ApiError(
                400,
                f"{where}.tool_use_id is {block.tool_use_id!r}, which is the id of no tool_use before it; "
                "pass the id of the call that it answers.",
            )
        content = lead + self._dropped("\n".join(texts), block, where)
        return {"role": "tool", "tool_call_id": block.tool_use_id, "name": name, "content": content}

    def _dropped(self, text: str, block: TextBlock | ToolResultBlock, where: str) -> str:
        """Return the text that the model reads."""
        if block.kv_drop == "exact":
            text = self._same(PLACEHOLDER)
        if self.drops is None:
            return text
        if where == self.new:
            text = self.drops.before(text)
        return self.drops.around(text, f"{where}.kv_drop") if block.kv_drop == "lossy" else text

    def _piece(self, text: str) -> str:
        self.place += 1
        return self._same(text)

    def _same(self, text: str) -> str:
        return text if self.intact is None or self.place <= self.intact else ALTERED + text

    def _mark(self, block: Block, where: str) -> None:
        if block.cache_control is not None:
            self.marks.append(Mark(self.place, block.cache_control.ttl, where))


def _blocks_of(body: ConversationFields) -> Iterator[tuple[str, str, AnyBlock]]:
    """Yield (role, location, block) for every block of the messages."""
    for i, message in enumerate(body.messages):
        for j, block in enumerate(message.content):
            yield message.role, f"messages.{i}.content.{j}", block


def check_drops(body: ConversationFields) -> bool:
    """Whether any text is dropped from the cache. Raises: ApiError for a text that cannot be dropped."""
    last, found = f"messages.{len(body.messages) - 1}.", False
    own = [("system", f"system.{i}", block) for i, block in enumerate(body.system or ())]
    for role, where, block in (*own, *_blocks_of(body)):
        if not isinstance(block, (TextBlock, ToolResultBlock)):
            continue
        parts = block.content if isinstance(block, ToolResultBlock) else [block]
        inner = next(
            (i for i, part in enumerate(parts) if part is not block and part.kv_drop is not None), None
        )
        if inner is not None:
            name = f"{where}.content.{inner}.kv_drop"
            raise ApiError(400, f"{name} is set, but a result is dropped whole; set it on {where}.", name)
        text, name = "".join(part.text for part in parts), f"{where}.kv_drop"
        is_last = where.startswith(last)
        check_place(block.kv_drop, text, name, is_system=role == "system", is_last=is_last)
        found = found or block.kv_drop == "lossy"
    return found


def first_new(body: ConversationFields) -> str:
    """Location of the first text or result that the previous turn did not have."""
    last = len(body.messages) - 1
    answers = [place for place in range(last) if body.messages[place].role == "assistant"]
    new = answers[-1] + 1 if answers else last
    kinds = (TextBlock, ToolResultBlock)
    blocks = enumerate(body.messages[new].content)
    number = next((number for number, block in blocks if isinstance(block, kinds)), 0)
    return f"messages.{new}.content.{number}"


def _joined(written: list[TemplateMessage]) -> Iterator[TemplateMessage]:
    """Merge thoughts, the text after them and the calls after that into one message, as templates write
    them."""
    pending: TemplateMessage | None = None
    for message in written:
        if pending is None:
            pending = message
        elif (
            pending["role"] == message["role"] == "assistant"
            and "tool_calls" not in pending
            and "reasoning_content" not in message
        ):
            pending = {**pending, **message, "content": pending["content"] + message["content"]}
        else:
            yield pending
            pending = message
    if pending is not None:
        yield pending
