"""The body of /v1/responses; any other field is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from kvreclaim.server.base.fields import MAX_INT32, MAX_TOOLS, Fields, Listed, at_most, described, refusal
from kvreclaim.server.openai.messages import FunctionDefinition
from kvreclaim.server.openai.prompts import MAX_LOGPROBS, SharedFields, Verbosity
from kvreclaim.server.responses.items import Items

LOGPROBS = "message.output_text.logprobs"
MAX_FORMAT = 8
"""Most entries of text.format."""


def _function(value: Any) -> Any:
    """Refuse other tools than functions before their fields are validated."""
    if isinstance(value, dict) and value.get("type") != "function":
        raise refusal("its type must be 'function'; this server has no tools of its own, such as web search")
    return value


class FlatFunction(FunctionDefinition):
    """A function in the format of the Responses API, without nesting."""

    type: Literal["function"]


class ChosenFunction(Fields):
    type: Literal["function"]
    name: str = Field(min_length=1)


class AllowedFunctions(Fields):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[Listed[ChosenFunction], Field(min_length=1, max_length=MAX_TOOLS)]


class TextOptions(Fields):
    """format: chat's response_format, but with the schema's fields next to the type"""

    format: Annotated[dict[str, Any], at_most(MAX_FORMAT)] | None = None
    verbosity: Verbosity | None = None


class ReasoningOptions(Fields):
    """summary: reasoning is shown in full"""

    effort: str | None = None
    summary: Annotated[Literal["auto"], described("'auto'; reasoning is not summarised")] | None = None


class ResponsesStreamOptions(Fields):
    include_obfuscation: Annotated[Literal[False], described("false; nothing is added to events")] | None = (
        None
    )


Included = Literal["message.output_text.logprobs", "reasoning.encrypted_content"]
Include = Annotated[
    Annotated[Listed[Included], Field(max_length=2)],
    described(f"a list of {LOGPROBS} and reasoning.encrypted_content"),
]


class ResponsesRequest(SharedFields):
    """Fields of the Responses API; docs/api.md describes them. None stands for the default given there."""

    input: Items
    instructions: str | None = None
    previous_response_id: str | None = Field(None, min_length=1)
    tools: (
        Annotated[Listed[Annotated[FlatFunction, BeforeValidator(_function)]], Field(max_length=MAX_TOOLS)]
        | None
    ) = None
    tool_choice: (
        Annotated[
            Literal["auto", "none", "required"] | ChosenFunction | AllowedFunctions,
            described(
                '"auto", "none", "required", {"type": "function", "name": ...} or {"type": "allowed_tools", '
                '"mode": "auto" or "required", "tools": [...]}'
            ),
        ]
        | None
    ) = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    include: Include | None = None
    truncation: Literal["auto", "disabled"] | None = None
    background: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = Field(None, ge=0, le=MAX_INT32)

    @property
    def kept(self) -> bool:
        """Whether the response is stored."""
        return self.store is not False

    @property
    def in_pieces(self) -> bool:
        """Whether the output is sent or kept as events."""
        return bool(self.stream or self.background)

    @property
    def with_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())
