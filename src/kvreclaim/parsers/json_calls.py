"""Calls whose arguments the model writes as JSON."""

from __future__ import annotations

import re
import string
from dataclasses import dataclass
from functools import partial

from pydantic_core import from_json

from kvreclaim.parsers.json_object import JsonObject
from kvreclaim.parsers.json_value import members
from kvreclaim.parsers.parser import Parser, Tools
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd
from kvreclaim.parsers.scanner import Reading, overlap

NAME = r"(?P<name>[^\s<>{}\[\]\"|｜]{1,128})"
QUOTED = r'(?P<quoted>"(?:[^"\\]|\\.){1,128}")'
FIELDS = rf'\{{\s*"name"\s*:\s*{QUOTED}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
MORE_FIELDS = r'\s*(?:,\s*"\w+"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[\w.]+)\s*)*\}'
LONGEST = 512
"""Characters before and behind a call's arguments."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a call: head, the object of arguments, tail.

    head: with the group `name`, or `quoted`, and perhaps `id`
    more: between two calls of which the second has no marker; end: behind the last of them
    """

    head: re.Pattern[str]
    tail: re.Pattern[str]
    more: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """opens: markers that begin a call; close: the one that ends it, if there is one
    around: markers around all calls, which belong to nothing
    whole:  a call is one object, whose fields may also stand in another order
    """

    opens: tuple[str, ...]
    forms: tuple[Form, ...]
    close: str = ""
    around: tuple[str, ...] = ()
    whole: bool = False


HERMES = JsonFormat(
    opens=("<tool_call>",),
    forms=(Form(re.compile(rf"\s*{FIELDS}"), re.compile(rf"{MORE_FIELDS}\s*</tool_call>")),),
    close="</tool_call>",
    whole=True,
)
MISTRAL = JsonFormat(
    opens=("[TOOL_CALLS]",),
    forms=(
        Form(
            re.compile(rf"\s*{NAME}(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{{)"),
            re.compile(""),
        ),
        Form(re.compile(rf"\s*\[?\s*{FIELDS}"), re.compile(MORE_FIELDS), more=",", end="]"),
    ),
)
DEEPSEEK = JsonFormat(
    opens=("<｜tool▁call▁begin｜>",),
    forms=(
        Form(
            re.compile(rf"(?:function<｜tool▁sep｜>)?{NAME}(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{{)"),
            re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>"),
        ),
    ),
    close="<｜tool▁call▁end｜>",
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = JsonFormat(
    opens=("<|tool_call_begin|>",),
    forms=(
        Form(
            re.compile(
                r"\s*(?P<id>(?:functions\.)?(?P<name>[\w.\-]{1,128}):\d+)\s*"
                r"<\|tool_call_argument_begin\|>\s*(?=\{)"
            ),
            re.compile(r"\s*<\|tool_call_end\|>"),
        ),
    ),
    close="<|tool_call_end|>",
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
LLAMA = JsonFormat(
    opens=("<|python_tag|>",),
    forms=(Form(re.compile(rf"\s*{FIELDS}"), re.compile(r"\s*\}"), more=";"),),
)
ARRAY = JsonFormat(
    opens=(),
    forms=(Form(re.compile(rf"\s*\[?\s*{FIELDS}"), re.compile(r"\s*\}"), more=",", end="]"),),
)


class JsonCalls(Parser):
    """Text, and calls in one format."""

    def __init__(self, form: JsonFormat, tools: Tools | None = None) -> None:
        self.format = form
        self._object_end: int | None = None
        super().__init__(tools)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.format.opens, *self.format.around)

    def read(self, *, trim: bool = False) -> Reading[None]:
        while marker := (yield from self.scanner.text_until(*self.markers, trim=trim)):
            trim = marker in self.format.around or (yield from self.calls())

    def calls(self) -> Reading[bool]:
        """Read a call, and those that follow it without a marker. Returns: False if text follows."""
        scanner = self.scanner
        while found := (yield from self._head()):
            form, name, call_id = found
            scanner.pieces.append(CallBegin(name, call_id))
            complete = (yield from scanner.stream_object()) and (yield from self._tail(form.tail))
            scanner.pieces.append(CallEnd(None if complete else scanner.taken))
            scanner.taken = ""
            if not complete or not (yield from self._goes_on(form)):
                return complete
        if self.format.whole and (yield from self._whole()):
            return True
        scanner.release()
        return False

    def accepts(self, name: str) -> bool:
        """Whether a function of this name can be called."""
        return True

    def _head(self) -> Reading[tuple[Form, str, str | None] | None]:
        """Read up to the arguments of a call. Returns: its form, name and id; None if there are none, which
        leaves all unread."""
        scanner, found, seen = self.scanner, JsonObject(), 0
        self._object_end = None
        while True:
            for form in self.format.forms:
                head = form.head.match(scanner.held, 0, LONGEST)
                if head and (name := _name(head)) and self.accepts(name):
                    scanner.take(head.end())
                    return form, name, head.groupdict().get("id")
            if self.format.whole:
                seen += found.feed(scanner.held[seen:])
                self._object_end = seen if found.done else None
                decided = found.done or found.bad
            else:
                decided = len(scanner.held) > LONGEST
            if decided or not (yield from scanner.more()):
                return None

    def _tail(self, pattern: re.Pattern[str]) -> Reading[bool]:
        """Read what ends a call; at the end of the output a part of it will do."""
        scanner = self.scanner
        while (tail := pattern.match(scanner.held, 0, LONGEST)) is None:
            if len(scanner.held) > LONGEST:
                return False
            if not (yield from scanner.more()):
                rest = scanner.held[: len(scanner.held) - overlap(scanner.held, self.format.close)]
                scanner.take(0 if rest.strip("}`" + string.whitespace) else len(scanner.held))
                return not scanner.held
        scanner.take(tail.end())
        return True

    def _goes_on(self, form: Form) -> Reading[bool]:
        """Read what stands between two calls, or behind the last one. Returns: whether another follows."""
        scanner = self.scanner
        while form.more and scanner.held.strip() in ("", form.more) and (yield from scanner.more()):
            pass
        sign = re.escape(form.more)
        found = re.match(rf"\s*{sign}\s*(?=\{{)", scanner.held) if form.more else None
        ends = re.match(rf"\s*{re.escape(form.end)}", scanner.held) if form.end else None
        if between := found or ends:
            scanner.take(between.end())
            scanner.taken = ""
        return found is not None

    def _whole(self) -> Reading[bool]:
        """Read a call that is one object, whatever the order of its fields."""
        scanner = self.scanner
        if self._object_end is None:
            return False
        call = members(scanner.held[: self._object_end])
        quoted, arguments = call.get("name", ""), call.get("arguments", call.get("parameters", "{}"))
        if not (quoted.startswith('"') and (name := from_json(quoted)) and arguments.startswith("{")):
            return False
        scanner.take(self._object_end)
        if not (yield from self._tail(re.compile(rf"\s*{re.escape(self.format.close)}"))):
            return False
        scanner.pieces += [CallBegin(name), Arguments(arguments), CallEnd()]
        scanner.taken = ""
        return True


class BareCalls(JsonCalls):
    """An output that begins with the JSON of a call, with or without a marker.

    bare: how it begins without one, less white space
    """

    def __init__(self, form: JsonFormat, bare: str, tools: Tools | None = None) -> None:
        self.bare = bare
        super().__init__(form, tools)

    def read(self, *, trim: bool = False) -> Reading[None]:
        while True:
            begins = re.sub(r"\s", "", self.scanner.held[:LONGEST])[: len(self.bare)]
            if (
                len(begins) == len(self.bare)
                or not self.bare.startswith(begins)
                or not (yield from self.scanner.more())
            ):
                break
        trim = begins == self.bare and (yield from self.calls())
        yield from super().read(trim=trim)

    def accepts(self, name: str) -> bool:
        return not self.tools or name in self.tools


LlamaCalls = partial(BareCalls, LLAMA, '{"name":"')
"""Reads calls of Llama 3."""
ArrayCalls = partial(BareCalls, ARRAY, '[{"name":"')
"""Reads calls that are one JSON array, as vLLM has forced ones."""


def _name(head: re.Match[str]) -> str | None:
    """The function's name; None where a quoted one is no JSON."""
    if "quoted" not in head.groupdict():
        return head["name"]
    try:
        return str(from_json(head["quoted"]))
    except ValueError:
        return None
