"""The bodies of /v1/messages and /v1/messages/count_tokens; any other field is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvreclaim.engine.features.structured_outputs.wire import Spelled, of_anthropic
from kvreclaim.parsers.json_value import json_object
from kvreclaim.server.base.config import MAX_INT32
from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import (
    MAX_BLOCKS,
    MAX_TOOLS,
    Fields,
    GeneratingFields,
    Listed,
    StopList,
    at_most,
    described,
    refusal,
)
from kvreclaim.server.shared.calls import Tool, ToolOffer
from kvreclaim.server.shared.drops import KVDrop

TTL_S: Mapping[str, float] = {"5m": 300.0, "1h": 3600.0}
BLOCKS_OF_ROLE: Mapping[str, tuple[str, ...]] = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "tool_use"),
    "system": ("text",),
}


def as_blocks(content: Any) -> Any:
    """Read a string as one text block."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


class CacheControl(Fields):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class Block(Fields):
    cache_control: CacheControl | None = None


class TextBlock(Block):
    type: Literal["text"]
    text: str
    kv_drop: KVDrop = None
    citations: None = None


class ToolUseBlock(Block):
    """input: an object, or its JSON text as streamed; the model reads invalid JSON as text"""

    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: Annotated[dict[str, Any] | str | None, described("an object, or the JSON text of one")] = None

    @property
    def arguments(self) -> dict[str, Any] | None:
        """Return the input, or None if it is no object."""
        return self.input if isinstance(self.input, dict) else json_object(self.input or "")


class ThinkingBlock(Block):
    """signature: accepted, never verified"""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


TextBlocks = Annotated[
    Annotated[Listed[TextBlock], Field(max_length=MAX_BLOCKS)],
    BeforeValidator(as_blocks, json_schema_input_type=str | list[TextBlock]),
]


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1)
    content: TextBlocks = Field(default_factory=list)
    is_error: bool = False
    kv_drop: KVDrop = None


AnyBlock = Annotated[TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock, Field(discriminator="type")]
AnyBlocks = Annotated[
    Listed[AnyBlock], BeforeValidator(as_blocks, json_schema_input_type=str | list[AnyBlock])
]


class AnthropicMessage(Fields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[AnyBlocks, Field(min_length=1)]

    @model_validator(mode="after")
    def _check_blocks(self) -> AnthropicMessage:
        allowed = BLOCKS_OF_ROLE[self.role]
        for index, block in enumerate(self.content):
            if block.type not in allowed:
                kinds = " and ".join(allowed)
                raise refusal(f"content.{index} is a {block.type} block; {self.role} messages hold {kinds}")
        return self


class AnthropicTool(Block):
    """type: only tools that the client runs; eager_input_streaming: inputs are always streamed at once;
    strict: inputs follow the schema"""

    type: Literal["custom"] | None = None
    eager_input_streaming: bool | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(Fields):
    """name: the tool to call, with the type `tool`"""

    type: Literal["auto", "none", "any", "tool"]
    name: str | None = Field(None, min_length=1)
    disable_parallel_tool_use: bool | None = None


OutputFormat = Annotated[dict[str, Any], at_most(2)]
"""type json_schema, and a schema"""


class OutputConfig(Fields):
    format: OutputFormat | None = None


class Thinking(Fields):
    """budget_tokens: for reasoning, with `enabled` only; display: reasoning is always shown in full"""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    display: Literal["summarized"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if (self.budget_tokens is not None) != (self.type == "enabled"):
            needed = "needs" if self.type == "enabled" else "takes no"
            raise refusal(f"thinking of type {self.type!r} {needed} budget_tokens")
        return self


class Metadata(Fields):
    user_id: str | None = Field(None, min_length=1, max_length=256)


class ConversationFields(Fields):
    """Fields that make up the prompt: all that count_tokens takes."""

    model: str
    messages: Annotated[Listed[AnthropicMessage], Field(min_length=1)]
    system: TextBlocks | None = None
    tools: Annotated[Listed[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    cache_control: CacheControl | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def offered(self) -> dict[str, dict[str, Any]] | None:
        """Input schemas of the tools in the prompt; None: no tools."""
        if not self.tools or (self.tool_choice is not None and self.tool_choice.type == "none"):
            return None
        return {tool.name: tool.input_schema for tool in self.tools}

    @property
    def offer(self) -> ToolOffer | None:
        """Tools that the answer may call; None: none. Raises: ApiError."""
        if self.offered is None:
            return None
        choice = self.tool_choice or ToolChoice(type="auto", name=None)
        tools = [
            Tool(tool.name, tool.input_schema, bool(tool.strict), f"tools.{place}.input_schema")
            for place, tool in enumerate(self.tools or ())
        ]
        if choice.type == "tool":
            tools = [tool for tool in tools if tool.name == choice.name]
        forced, strict = choice.type in ("any", "tool"), next((tool for tool in tools if tool.strict), None)
        field = None if strict is None else strict.place.replace("input_schema", "strict")
        field = "tool_choice" if forced else field
        one_call = bool(choice.disable_parallel_tool_use) or choice.type == "tool"
        return ToolOffer(tools, forced=forced, one_call=one_call, field=field)


class MessageRequest(GeneratingFields, ConversationFields):
    """The body of /v1/messages; docs/api.md describes its fields. None stands for the default given there."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopList | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None

    @property
    def structured(self) -> Spelled | None:
        """Constraint on the answer; None: unconstrained. Raises: ApiError, InvalidArgumentError."""
        of_config = None if self.output_config is None else self.output_config.format
        if of_config is not None and self.output_format is not None:
            raise ApiError(400, "output_config.format and output_format are both set; leave one out.")
        if of_config is not None:
            return of_anthropic(of_config, "output_config.format")
        return None if self.output_format is None else of_anthropic(self.output_format, "output_format")

    @property
    def thinking_token_budget(self) -> int | None:
        """Raises: ApiError if the budget leaves no room for the answer."""
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and budget >= self.max_tokens:
            raise ApiError(
                400,
                f"thinking.budget_tokens is {budget}, but max_tokens is {self.max_tokens}, which the answer "
                "needs, too; lower it.",
            )
        return budget
