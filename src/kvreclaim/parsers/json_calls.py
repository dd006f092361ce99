"""Calls whose arguments the model writes as JSON."""

from __future__ import annotations

import json
import re
import string
from dataclasses import dataclass

from pydantic_core import from_json

from kvreclaim.parsers.parser import Parser, Tools
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd
from kvreclaim.parsers.scanner import Reading, object_of, overlap

NAME = r"(?P<name>[^\s<>{}\[\]\"|｜]{1,128})"
QUOTED = r'"(?P<name>(?:[^"\\]|\\.){1,128})"'
FIELDS = rf'\{{\s*"name"\s*:\s*{QUOTED}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
MORE_FIELDS = r'\s*(?:,\s*"\w+"\s*:\s*(?:"(?:[^"\\]|\\.)*"|[\w.]+)\s*)*\}'
LONGEST = 512
"""Characters before and behind a call's arguments."""


@dataclass(frozen=True, slots=True)
class Form:
    """One way to write a call: head, the object of arguments, tail.

    head: with the groups `name` and perhaps `id`
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
    whole:  a call may also be one object whose fields stand in another order
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
BARE = '{"name":"'
"""How a call begins that has no marker, less white space."""


class JsonCalls(Parser):
    """Text, and calls in one format."""

    def __init__(self, form: JsonFormat, tools: Tools | None = None) -> None:
        self.format = form
        super().__init__(tools)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.format.opens, *self.format.around)

    def read(self) -> Reading[None]:
        trim = False
        while marker := (yield from self.scanner.text_until(*self.markers, trim=trim)):
            trim = marker in self.format.around or (yield from self.calls())

    def calls(self) -> Reading[bool]:
        """Read a call, and those that follow it without a marker. Returns: False if text follows."""
        scanner = self.scanner
        while found := (yield from self._head()):
            form, head = found
            scanner.pieces.append(CallBegin(from_json(f'"{head["name"]}"'), head.groupdict().get("id")))
            complete = (yield from scanner.stream_object()) and (yield from self._tail(form))
            scanner.pieces.append(CallEnd(None if complete else scanner.taken))
            scanner.taken = ""
            if not complete or not (yield from self._goes_on(form)):
                return complete
        if self.format.whole and self._whole():
            return True
        scanner.release()
        return False

    def accepts(self, name: str) -> bool:
        """Whether a function of this name can be called."""
        return True

    def _head(self) -> Reading[tuple[Form, re.Match[str]] | None]:
        """Read up to the arguments of a call. Returns: None if there are none, which leaves all unread."""
        scanner = self.scanner
        while True:
            for form in self.format.forms:
                head = form.head.match(scanner.held, 0, LONGEST)
                if head and self.accepts(head["name"]):
                    scanner.take(head.end())
                    return form, head
            decided = self._close_at() >= 0 if self.format.whole else len(scanner.held) > LONGEST
            if decided or not (yield from scanner.more()):
                return None

    def _tail(self, form: Form) -> Reading[bool]:
        """Read what ends a call; at the end of the output a part of it will do."""
        scanner = self.scanner
        while (tail := form.tail.match(scanner.held)) is None:
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
        while form.more and not scanner.held.strip() and (yield from scanner.more()):
            pass
        place = len(scanner.held) - len(scanner.held.lstrip())
        sign = scanner.held[place : place + 1]
        if sign and sign in (form.more, form.end):
            scanner.take(place + 1)
            scanner.taken = ""
        return bool(sign) and sign == form.more

    def _close_at(self) -> int:
        """Where the call's end stands that is in no string; -1: nowhere yet."""
        held, close = self.scanner.held, self.format.close
        place = held.find(close)
        while place >= 0 and _within_string(held[:place]):
            place = held.find(close, place + 1)
        return place

    def _whole(self) -> bool:
        """Read a call that is one object, whatever the order of its fields."""
        scanner, place = self.scanner, self._close_at()
        end = len(scanner.held) if place < 0 else place
        call = object_of(scanner.held[:end]) or {}
        name, arguments = call.get("name"), call.get("arguments", {})
        if not (isinstance(name, str) and name and isinstance(arguments, dict)):
            return False
        text = json.dumps(arguments, ensure_ascii=False)
        scanner.pieces += [CallBegin(name), Arguments(text), CallEnd()]
        scanner.take(end if place < 0 else end + len(self.format.close))
        return True


class LlamaCalls(JsonCalls):
    """Calls of Llama 3: an output that begins with the JSON of one, with or without a marker."""

    def __init__(self, tools: Tools | None = None) -> None:
        super().__init__(LLAMA, tools)

    def read(self) -> Reading[None]:
        while True:
            begins = re.sub(r"\s", "", self.scanner.held[:LONGEST])[: len(BARE)]
            if (
                len(begins) == len(BARE)
                or not BARE.startswith(begins)
                or not (yield from self.scanner.more())
            ):
                break
        if begins == BARE:
            yield from self.calls()
        yield from super().read()

    def accepts(self, name: str) -> bool:
        return not self.tools or name in self.tools


def _within_string(text: str) -> bool:
    """Whether this beginning of a JSON text ends inside a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1
