"""The grammar of an answer: calls of functions in a format, free text, reasoning before either."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

from kvreclaim.parsers.arguments import Callee, TagShape, json_arguments, tag_arguments
from kvreclaim.parsers.formats import calls_in_reasoning
from kvreclaim.parsers.harmony import CHANNEL, ENDS, MESSAGE, START
from kvreclaim.parsers.json_calls import FIRST_FIELDS
from kvreclaim.parsers.lark import ANY, Lark, escaped
from kvreclaim.parsers.thinking import ThinkSpan


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


ANSWER = "@answer"
"""The grammar of a structured output, by this name."""
MAX_CALLS = 32
"""Most calls of an answer that consists of calls: a weak model might never stop."""


@dataclass(frozen=True, slots=True)
class BareShape:
    """Calls without an opening, at the beginning of an answer.

    lead:    regular expression of what may precede the first
    between: template between two of them
    end:     of the shape with an opening, which these lack
    fence:   what may follow the last
    forced:  forced calls may be written so
    """

    lead: str
    between: str
    end: str = ""
    fence: str = ""
    forced: bool = False

    def read_as_calls(self, functions: Sequence[Callee]) -> str:
        """Return a regular expression of the beginnings that the parser may read as calls."""
        if self.forced:
            return rf'{self.lead}\{{\s*"(?:{"|".join(FIRST_FIELDS)})"\s*:'
        names = "|".join(escaped(each.name) for each in functions)
        return rf'{self.lead}{BARE_NAME}\s*"(?:{names})"'


BARE_NAME = r'\{\s*"name"\s*:'
BARE = {
    "hermes": BareShape(r"\s*(?:```(?:json)?\s*)?", "\n", "~</tool_call>", "```"),
    "llama3_json": BareShape(r"\s*", "~;", forced=True),
}


@dataclass(frozen=True, slots=True)
class Calls:
    """The calls that an answer may contain.

    form:     the name of a tool parser
    forced:   the answer consists of calls
    one_call: at most one
    """

    form: str
    functions: Sequence[Callee]
    forced: bool
    one_call: bool


def answer_grammar(
    lark: Lark, calls: Calls | None, thinking: ThinkSpan | None, *, harmony: bool, structured: bool
) -> str:
    """Return the grammar of an answer: forced calls; or, if it is structured, calls and the grammar `answer`;
    or calls and free text.

    Raises: InvalidArgumentError for a schema that the format cannot express.
    """
    if harmony:
        return lark.written(_harmony(lark, calls, structured=structured))
    options = [ANSWER] if structured and (calls is None or not calls.forced) else []
    if calls is not None and (calls.forced or structured):
        options.append(_calls(lark, calls))
    if options:
        answer = f"{lark.shaped('~')} {lark.rule(*options)}" if thinking else lark.rule(*options)
    else:
        assert calls is not None, "an answer without calls and without structure needs no grammar"
        opening = thinking.form.opening if thinking and not thinking.begun else ""
        answer = _text_and_calls(lark, calls, "" if lark.has(opening) else opening)
    return lark.written(answer if thinking is None else _behind(lark, thinking, calls, answer))


def _behind(lark: Lark, thinking: ThinkSpan, calls: Calls | None, answer: str) -> str:
    """Put reasoning before the answer; no call may begin in it, because that would end it."""
    form = thinking.form
    make = None if calls is None else calls_in_reasoning(calls.form)
    markers = () if make is None else make().markers
    barred = [escaped(each) for each in markers if not lark.has(each)]
    but = f"{ANY}(?:{'|'.join(barred)}){ANY}" if barred else None
    thought = f"{lark.until(form.closing, but=but)} {answer}"
    return thought if thinking.begun else lark.rule(f"{lark.shaped('~' + form.opening)} {thought}", answer)


def _shapes(lark: Lark, form: str) -> list[CallShape]:
    """Return the call shapes that models with these tokens write."""
    shapes = SHAPES[form]
    needed = {shape.needs for shape in shapes if shape.needs and lark.has(shape.needs)}
    return [shape for shape in shapes if not needed or shape.needs in needed]


def _calls(lark: Lark, calls: Calls) -> str:
    """Calls only."""
    shapes = _shapes(lark, calls.form)
    optional = "?" if calls.form in BARE and BARE[calls.form].forced else ""
    opening = shapes[0].opening
    more = f"{{0,{MAX_CALLS - 1}}}"
    ways = [_group(lark, calls, shape, more=more) for shape in shapes if shape.opening == opening]
    behind = "" if calls.one_call else f" {lark.shaped('~')}"  # models may end a line before they stop
    return lark.rule(f"{lark.rule(lark.text(opening))}{optional} {lark.rule(*ways)}{behind}")


def _text_and_calls(lark: Lark, calls: Calls, thought: str) -> str:
    """Free text in which a call is constrained once its opening is written.

    thought: a marker with which the text must not begin
    """
    ways: dict[str, list[str]] = {}
    for shape in _shapes(lark, calls.form):
        ways.setdefault(shape.opening, []).append(_group(lark, calls, shape, more="*" if shape.trail else ""))
    bare = BARE.get(calls.form)
    barred = [rf"\s*{escaped(thought)}"] if thought else []
    barred += [] if bare is None else [bare.read_as_calls(calls.functions)]
    but = f"(?:{'|'.join(barred)}){ANY}" if barred else None
    first = lark.rule(
        *(f"{lark.until(opening, but=but)} {lark.rule(*each)}" for opening, each in ways.items())
    )
    more = lark.rule(*(f"{lark.until(opening)} {lark.rule(*each)}" for opening, each in ways.items()))
    behind = "" if calls.one_call else f"{more}* {lark.matching(ANY)}?"
    starts = [lark.matching(ANY, but=but), f"{first} {behind}"]
    if bare is not None:
        starts.append(_bare_calls(lark, calls, bare))
    return lark.rule(*starts)


def _bare_calls(lark: Lark, calls: Calls, bare: BareShape) -> str:
    """Calls without an opening. A terminal includes the first function's name, which free text excludes."""
    (shape,) = _shapes(lark, calls.form)
    shape = replace(shape, call=shape.call.removesuffix(bare.end))
    rest = shape.call.partition('%name"')[2]
    first = lark.rule(
        *(
            lark.matching(rf'{bare.lead}{BARE_NAME}\s*"{escaped(one.name)}"')
            + f" {lark.shaped(rest, args=shape.arguments(lark, one))}"
            for one in calls.functions
        )
    )
    next_one = f"{lark.shaped(bare.between)} {_group(lark, replace(calls, one_call=True), shape)}"
    others = "" if calls.one_call else f"({next_one})*"
    fence = f"({lark.text(bare.fence)} {lark.shaped('~')})?" if bare.fence else ""
    return f"{first} {others} {lark.shaped('~')} {fence}"


def _group(lark: Lark, calls: Calls, shape: CallShape, *, more: str = "*") -> str:
    """What follows an opening. more: how often another call follows the first; empty: never"""
    own = lark.matching("[a-zA-Z0-9]{1,16}")
    parts = {
        "id": f"({lark.shaped('[CALL_ID]%own', own=own)})?" if lark.has("[CALL_ID]") else "",
        "more": f"""({lark.shaped('~,~"id"~:~"%own"', own=own)})?""",
        "number": lark.matching("[0-9]{1,4}"),
    }
    each = [
        lark.shaped(shape.call, name=lark.text(one.name), args=shape.arguments(lark, one), **parts)
        for one in calls.functions
    ]
    call = lark.rule(*each)
    others = f"({lark.shaped(shape.between)} {call}){more}" if more and not calls.one_call else ""
    return " ".join(filter(None, (lark.shaped(shape.lead), call, others, lark.shaped(shape.trail))))


def _harmony(lark: Lark, calls: Calls | None, *, structured: bool) -> str:
    """Messages of a turn: reasoning and remarks, then one that ends it."""

    def message(head: str) -> str:
        return lark.shaped(f"{CHANNEL}{head}{MESSAGE}")

    channels = ("analysis",) if calls is None or calls.forced else ("analysis", "commentary")
    before = lark.rule(
        *(f"{message(each)} {lark.until(ENDS[0])} {lark.text(START + 'assistant')}" for each in channels)
    )
    options = []
    json = lark.rule(lark.shaped("~<|constrain|>json"), lark.text(" json"))
    for one in () if calls is None else calls.functions:
        head = lark.shaped(f"{CHANNEL}commentary to=functions.{one.name}%json~{MESSAGE}", json=f"{json}?")
        options.append(f"{head} {json_arguments(lark, one)} {lark.rule(lark.text(ENDS[2]))}?")
    if structured and (calls is None or not calls.forced):
        options.append(f"{message('final')} {ANSWER}")
    elif calls is not None and not calls.forced:
        but = None if lark.has(CHANNEL) else f"{ANY}{escaped(CHANNEL)}{ANY}"
        options.append(f"{message('final')} {lark.matching(ANY, but=but)}")
    return f"{before}* {lark.rule(*options)}"
