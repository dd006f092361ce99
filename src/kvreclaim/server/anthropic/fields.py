"""The bodies of /v1/messages and /v1/messages/count_tokens; any other field is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from kvreclaim.server.config import MAX_INT32
from kvreclaim.server.fields import MAX_BLOCKS, MAX_TOOLS, Fields, GeneratingFields, Listed, StopList, refusal

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
    citations: None = None


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str = Field(min_length=1)
    name: str = Field(min_length=1)
    input: dict[str, Any]


class ThinkingBlock(Block):
    """signature: of the answer, which nothing checks"""

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
    """type: only tools that the client runs itself; eager_input_streaming: inputs always stream at once"""

    type: Literal["custom"] | None = None
    eager_input_streaming: bool | None = None
    name: str = Field(min_length=1)
    description: str | None = None
    input_schema: dict[str, Any]


class ToolChoice(Fields):
    """auto or none; calls cannot be forced, which this server does not do."""

    type: Literal["auto", "none"]
    disable_parallel_tool_use: bool | None = None


class Thinking(Fields):
    """budget_tokens: of reasoning, with `enabled` alone; display: reasoning is always shown whole"""

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
    """Fields that make the prompt: all that count_tokens takes."""

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
        """The inputs' schemas of the tools that the model is told of; None: of none."""
        if not self.tools or (self.tool_choice is not None and self.tool_choice.type == "none"):
            return None
        return {tool.name: tool.input_schema for tool in self.tools}


class MessageRequest(GeneratingFields, ConversationFields):
    """The body of /v1/messages; docs/api.md describes its fields. None stands for the default named there."""

    max_tokens: int = Field(ge=1)
    stop_sequences: StopList | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None

    @property
    def thinking_token_budget(self) -> int | None:
        return None if self.thinking is None else self.thinking.budget_tokens
