"""The grammar of an answer: calls of functions in a format, free text, reasoning before either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvreclaim.parsers.arguments import Callee, json_arguments
from kvreclaim.parsers.formats import calls_in_reasoning
from kvreclaim.parsers.harmony import CHANNEL, ENDS, MESSAGE, START
from kvreclaim.parsers.json_calls import FIRST_FIELDS
from kvreclaim.parsers.lark import ANY, Lark, escaped
from kvreclaim.parsers.shapes import SHAPES, CallShape
from kvreclaim.parsers.thinking import ThinkSpan

ANSWER = "@answer"
"""The grammar of a structured output, by this name."""
MAX_CALLS = 32
"""Most calls of an answer that consists of calls: a weak model might never stop."""
BARE = {"llama3_json": (r'\s*\{\s*"name"\s*:', '~{~"name"~:')}
"""Beginning of an answer that is a call without an opening, as a regular expression and in the call's
shape."""
READ_AS_CALLS = rf'\s*\{{\s*"(?:{"|".join(FIRST_FIELDS)})"\s*:'
"""All beginnings of answers that the parser may read as such calls, as a regular expression."""


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
    optional = "?" if calls.form in BARE else ""
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
    bare, written = BARE.get(calls.form, ("", ""))
    barred = [rf"\s*{escaped(thought)}"] * bool(thought) + [READ_AS_CALLS] * bool(bare)
    but = f"(?:{'|'.join(barred)}){ANY}" if barred else None
    first = lark.rule(
        *(f"{lark.until(opening, but=but)} {lark.rule(*each)}" for opening, each in ways.items())
    )
    more = lark.rule(*(f"{lark.until(opening)} {lark.rule(*each)}" for opening, each in ways.items()))
    behind = "" if calls.one_call else f"{more}* {lark.matching(ANY)}?"
    starts = [lark.matching(ANY, but=but), f"{first} {behind}"]
    if bare:
        (shape,) = _shapes(lark, calls.form)
        rest = _group(
            lark,
            calls,
            replace(shape, call=shape.call.removeprefix(written), between=shape.between + written),
        )
        starts.append(f"{lark.matching(bare)} {rest} {lark.shaped('~')}")
    return lark.rule(*starts)


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
