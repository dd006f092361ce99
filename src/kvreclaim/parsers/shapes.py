"""Call formats of models, for every format that a grammar can enforce."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from kvreclaim.parsers.arguments import Callee, TagShape, json_arguments, tag_arguments
from kvreclaim.parsers.lark import Lark


@dataclass(frozen=True, slots=True)
class CallShape:
    """opening, lead, a call, perhaps `between` and one more, trail: templates of Lark.shaped.

    opening: its first text; unique to calls
    call:    with %name and %args, and perhaps %id, %more or %number, by which models distinguish calls
    needs:   the special token of models with this format
    """

    opening: str
    call: str
    between: str
    lead: str = ""
    trail: str = ""
    needs: str = ""
    arguments: Callable[[Lark, Callee], str] = json_arguments


def _within(opening: str, trail: str, *calls: CallShape) -> tuple[CallShape, ...]:
    """Return calls with and without markers around all of them; the parser reads both."""
    around = [
        replace(one, opening=opening, lead=f"~{one.opening}", between=f"~{one.opening}", trail=f"~{trail}")
        for one in calls
    ]
    return (*around, *calls)


JSON_CALL = '~{~"name"~:~"%name"~,~"arguments"~:~%args~}'
QWEN3_CODER = partial(tag_arguments, tags=TagShape("~<parameter=%key>", "</parameter>", lines=True))
GLM = partial(tag_arguments, tags=TagShape("~<arg_key>%key</arg_key>~<arg_value>", "</arg_value>"))
MINIMAX = partial(tag_arguments, tags=TagShape('~<parameter name="%key">', "</parameter>"))
DSML = partial(
    tag_arguments,
    tags=TagShape('~<｜DSML｜parameter name="%key" string="%string">', "</｜DSML｜parameter>", typed=True),
)
SHAPES: Mapping[str, tuple[CallShape, ...]] = MappingProxyType(
    {
        "hermes": (CallShape("<tool_call>", f"{JSON_CALL}~</tool_call>", "~<tool_call>"),),
        "qwen3_coder": (
            CallShape(
                "<tool_call>",
                "~<function=%name>%args~</function>~</tool_call>",
                "~<tool_call>",
                arguments=QWEN3_CODER,
            ),
            CallShape("<function=", "%name>%args~</function>", "~<function=", arguments=QWEN3_CODER),
        ),
        "llama3_json": (CallShape("<|python_tag|>", '~{~"name"~:~"%name"~,~"parameters"~:~%args~}', "~;"),),
        "json_array": (CallShape("[", '~{~"name"~:~"%name"~,~"parameters"~:~%args~}', "~,", trail="~]"),),
        "mistral": (
            CallShape("[TOOL_CALLS]", "%name%id[ARGS]~%args", "[TOOL_CALLS]", needs="[ARGS]"),
            CallShape("[TOOL_CALLS]", "%name~%args", "[TOOL_CALLS]"),
            CallShape("[TOOL_CALLS]", f"{JSON_CALL[:-1]}%more~}}", "~,", lead="~[", trail="~]"),
        ),
        "deepseek_v3": _within(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            CallShape(
                "<｜tool▁call▁begin｜>",
                "function<｜tool▁sep｜>%name~```json~%args~```~<｜tool▁call▁end｜>",
                "~<｜tool▁call▁begin｜>",
            ),
            CallShape(
                "<｜tool▁call▁begin｜>",
                "%name<｜tool▁sep｜>~%args~<｜tool▁call▁end｜>",
                "~<｜tool▁call▁begin｜>",
            ),
        ),
        "deepseek_v32": _within(
            "<｜DSML｜function_calls>",
            "</｜DSML｜function_calls>",
            CallShape(
                "<｜DSML｜invoke",
                ' name="%name">%args~</｜DSML｜invoke>',
                "~<｜DSML｜invoke",
                arguments=DSML,
            ),
        ),
        "glm45": (CallShape("<tool_call>", "~%name%args~</tool_call>", "~<tool_call>", arguments=GLM),),
        "kimi_k2": _within(
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            CallShape(
                "<|tool_call_begin|>",
                "~functions.%name:%number~<|tool_call_argument_begin|>~%args~<|tool_call_end|>",
                "~<|tool_call_begin|>",
            ),
        ),
        "minimax_m2": _within(
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            CallShape("<invoke", ' name="%name">%args~</invoke>', "~<invoke", arguments=MINIMAX),
        ),
    }
)
"""Shapes by tool parser. Models write those with the first one's opening; the parser also reads the others as
calls."""
