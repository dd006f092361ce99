"""Functions that an answer may call, must call, or calls by their schemas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from kvreclaim.server.base.errors import ApiError
from kvreclaim.server.base.fields import MAX_TOOLS, Fields, Listed, described
from kvreclaim.server.openai.messages import FunctionTool
from kvreclaim.server.shared.calls import Tool, ToolOffer


class NamedFunction(Fields):
    name: str = Field(min_length=1)


class FunctionChoice(Fields):
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[Listed[FunctionChoice], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Fields):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | FunctionChoice | AllowedToolsChoice,
    described(
        '"auto", "none", "required", {"type": "function", "function": {"name": ...}} or {"type": '
        '"allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
    ),
]


def offer_of(tools: Sequence[FunctionTool], choice: ToolChoice | None, *, one_call: bool) -> ToolOffer | None:
    """Return the callable functions; None: none. one_call: at most one. Raises: ApiError naming the field."""
    if choice == "none" or (not tools and choice in (None, "auto")):
        return None
    if not tools:
        raise ApiError(
            400,
            "tool_choice asks for a call, but there are no tools; pass some, or leave it out.",
            "tool_choice",
        )
    given = [
        Tool(
            tool.function.name,
            tool.function.parameters or {},
            bool(tool.function.strict),
            f"tools.{place}.function.parameters",
        )
        for place, tool in enumerate(tools)
    ]
    strict = next((each.place.replace("parameters", "strict") for each in given if each.strict), None)
    match choice:
        case FunctionChoice(function=function):
            chosen = _named([function.name], given, "tool_choice.function.name")
            return ToolOffer(chosen, forced=True, one_call=True, field="tool_choice")
        case AllowedToolsChoice(allowed_tools=allowed):
            names = [each.function.name for each in allowed.tools]
            chosen = _named(names, given, "tool_choice.allowed_tools.tools")
            return ToolOffer(
                chosen, forced=allowed.mode == "required", one_call=one_call, field="tool_choice"
            )
        case "required":
            return ToolOffer(given, forced=True, one_call=one_call, field="tool_choice")
    return ToolOffer(given, one_call=one_call, field=strict)


def _named(names: Sequence[str], tools: Sequence[Tool], field: str) -> list[Tool]:
    known = {tool.name for tool in tools}
    if (unknown := next((name for name in names if name not in known), None)) is not None:
        raise ApiError(
            400,
            f"{field} has {unknown[:80]!r}, which is the name of none of the tools; pass one of theirs.",
            field,
        )
    return [tool for tool in tools if tool.name in names]
