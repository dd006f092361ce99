"""Calls whose arguments the model writes as JSON."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from pydantic_core import from_json

from kvreclaim.parsers.json_object import JsonObject
from kvreclaim.parsers.json_value import members
from kvreclaim.parsers.parser import Parser, Tools
from kvreclaim.parsers.pieces import Arguments, CallBegin
from kvreclaim.parsers.scanner import Reading, overlap

NAME = r"[^\s<>{}\[\]\"|｜]{1,128}"
_STRING = r'"(?:[^"\\\x00-\x1f]|\\.)*"'
_OTHERS = rf'(?:(?!"(?:name|arguments|parameters)"){_STRING}\s*:\s*(?:{_STRING}|[\w.+\-]+)\s*,\s*)*'
FIELDS = re.compile(
    rf'\s*\{{\s*{_OTHERS}"name"\s*:\s*(?P<quoted>{_STRING})\s*,\s*{_OTHERS}"(?:arguments|parameters)"\s*:\s*'
    r"(?=\{)"
)
"""A call as one object, up to its arguments, if these follow the name and all else is short."""
ARGUMENTS = ("arguments", "parameters")
FIRST_FIELDS = ("name", "type", "id", "function", *ARGUMENTS)
"""Beginning of an object that may be a call without a marker."""
FENCE = re.compile(r"\s*```(?:json)?\s*")
LONGEST = 512
"""Characters before and after a call's arguments."""


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """How a call is written: head, the object of arguments, tail; or as one object with fields in any order,
    and tail.

    opens:  markers that begin a call; close: the one that ends it, if there is one
    tail:   after the arguments, or the object
    head:   before the arguments, with the group `name` or `recipient`, which may have the namespace
            "functions.", and perhaps `id`; None: a call is always one object
    whole:  a call may be one object
    names:  names that a function can have
    more:   between two objects if the second has no marker; end: after the last of them
    around: markers around all calls, which belong to nothing
    """

    opens: tuple[str, ...]
    tail: re.Pattern[str] = re.compile("")
    close: str = ""
    head: re.Pattern[str] | None = None
    whole: bool = True
    names: re.Pattern[str] = re.compile(r"(?s:.+)")
    more: str = ""
    end: str = ""
    around: tuple[str, ...] = ()


HERMES = JsonFormat(opens=("<tool_call>",), tail=re.compile(r"\s*</tool_call>"), close="</tool_call>")
MISTRAL = JsonFormat(
    opens=("[TOOL_CALLS]",),
    head=re.compile(rf"\s*(?P<name>{NAME})(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?\s*(?=\{{)"),
    names=re.compile(NAME),
    more=",",
    end="]",
)
DEEPSEEK = JsonFormat(
    opens=("<｜tool▁call▁begin｜>",),
    tail=re.compile(r"\s*(?:```)?\s*<｜tool▁call▁end｜>"),
    close="<｜tool▁call▁end｜>",
    head=re.compile(rf"(?:function<｜tool▁sep｜>)?(?P<name>{NAME})(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{{)"),
    whole=False,
    names=re.compile(NAME),
    around=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = JsonFormat(
    opens=("<|tool_call_begin|>",),
    tail=re.compile(r"\s*<\|tool_call_end\|>"),
    close="<|tool_call_end|>",
    head=re.compile(
        r"\s*(?P<id>(?P<recipient>[^\s<]{1,138}):\d+)\s*<\|tool_call_argument_begin\|>\s*(?=\{)", re.ASCII
    ),
    whole=False,
    names=re.compile(r"[^\s<]{1,128}"),
    around=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
)
UNMARKED = JsonFormat(opens=(), more="\n", end="```")
"""Calls as Qwen2.5-Coder writes them: objects without a marker, mostly within a code block."""
LLAMA = JsonFormat(opens=("<|python_tag|>",), more=";")
ARRAY = JsonFormat(opens=(), more=",", end="]")


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call up to its arguments, or all of it.

    fields:    the call is one object
    arguments: set if they came before the name; None: they follow
    """

    name: str
    id: str | None = None
    fields: bool = False
    arguments: str | None = None


class JsonCalls(Parser):
    """Text, and calls in one format."""

    def __init__(self, form: JsonFormat, tools: Tools | None = None) -> None:
        self.format = form
        super().__init__(tools)

    @property
    def markers(self) -> tuple[str, ...]:
        return (*self.format.opens, *self.format.around)

    @property
    def names(self) -> re.Pattern[str]:
        return self.format.names

    def read(self, *, trim: bool = False) -> Reading[None]:
        while marker := (yield from self.scanner.text_until(*self.markers, trim=trim)):
            trim = marker in self.format.around or (yield from self.calls())

    def calls(self) -> Reading[bool]:
        """Read a call, and further calls without a marker. Returns: False if text follows."""
        scanner = self.scanner
        while call := (yield from self._head()):
            begin = CallBegin(call.name, call.id)
            if call.arguments is None:
                scanner.pieces.append(begin)
                complete = yield from scanner.stream_object()
                if complete and call.fields:
                    complete = yield from self._last_fields()
                complete = complete and (yield from self._tail())
            elif complete := (yield from self._tail()):
                scanner.pieces += [begin, Arguments(call.arguments)]
            else:
                break
            scanner.end_call(complete=complete)
            if not complete or not (call.fields and (yield from self._is_followed())):
                return complete
        scanner.release()
        return False

    def accepts(self, name: str) -> bool:
        """Whether a function of this name can be called."""
        return True

    def _head(self) -> Reading[_Begun | None]:
        """Read up to the arguments of a call, or all of it. Returns: None if there is no call; nothing is
        consumed then."""
        scanner, form, found, seen = self.scanner, self.format, JsonObject(), 0
        while True:
            head = None if form.head is None else form.head.match(scanner.held, 0, LONGEST)
            if head is not None:
                return self._named(head)
            lead = len(scanner.held) - len(scanner.held.lstrip())
            if form.end and scanner.held.startswith("[", lead):
                lead = len(scanner.held) - len(scanner.held[lead + 1 :].lstrip())
            is_object = form.whole and scanner.held.startswith("{", lead)
            if is_object:
                fields = FIELDS.match(scanner.held, lead, lead + LONGEST)
                if fields is not None and (name := _name_of(fields)) is not None:
                    return self._taken(fields.end(), _Begun(name, fields=True))
                seen = max(seen, lead)
                seen += found.feed(scanner.held[seen:])
                if found.done:
                    call = _call_of(members(scanner.held[lead:seen]))
                    return None if call is None else self._taken(seen, call)
            if is_object:
                waits = not found.bad
            else:
                waits = len(scanner.held) <= (LONGEST if form.head or form.end else lead)
            if not waits or not (yield from scanner.more()):
                return None

    def _named(self, head: re.Match[str]) -> _Begun | None:
        """The call with this head."""
        groups = head.groupdict()
        recipient = groups.get("recipient")
        name = head["name"] if recipient is None else self.own_name(recipient)
        return self._taken(head.end(), _Begun(name, groups.get("id")))

    def _taken(self, size: int, call: _Begun) -> _Begun | None:
        """Consume the call's first characters; None if there is no such function."""
        if not self.accepts(call.name):
            return None
        self.scanner.take(size)
        return call

    def _last_fields(self) -> Reading[bool]:
        """Read the rest of a call's object after the arguments. An output may end there."""
        scanner, found, seen = self.scanner, JsonObject(), 0
        found.feed('{"":{}')
        while True:
            seen += found.feed(scanner.held[seen:])
            if found.done:
                scanner.take(seen)
            if found.done or found.bad:
                return found.done
            if not (yield from scanner.more()):
                scanner.take(len(scanner.held))
                return True

    def _tail(self) -> Reading[bool]:
        """Read the end of a call; at the end of the output a part of it suffices."""
        scanner = self.scanner
        while (tail := self.format.tail.match(scanner.held, 0, LONGEST)) is None:
            if len(scanner.held) > LONGEST:
                return False
            if not (yield from scanner.more()):
                return self._is_cut_short()
        scanner.take(tail.end())
        return True

    def _is_cut_short(self) -> bool:
        """Read the end of the output, if it is a partial end of a call. Returns: whether it is."""
        scanner = self.scanner
        rest = scanner.held[: len(scanner.held) - overlap(scanner.held, self.format.close)]
        if rest.strip("}`" + string.whitespace):
            return False
        scanner.take(len(scanner.held))
        return True

    def _is_followed(self) -> Reading[bool]:
        """Read the separator of two calls, or the end after the last. Returns: whether another follows."""
        scanner, form = self.scanner, self.format
        signs = tuple(filter(None, (form.more, form.end)))
        while any(sign.startswith(scanner.held.strip()) for sign in signs) and (yield from scanner.more()):
            pass
        sign = re.escape(form.more)
        found = re.match(rf"\s*{sign}\s*(?=\{{)", scanner.held) if form.more else None
        ends = re.match(rf"\s*{re.escape(form.end)}", scanner.held) if form.end else None
        if between := found or ends:
            scanner.take(between.end())
            scanner.taken = scanner.taken if found else ""
        return found is not None


class BareCalls(JsonCalls):
    """An output that begins with the JSON of a call, with or without a marker.

    leads: texts before an object without a marker
    bare:  the format of such calls, if it is not that of calls with a marker; the first then begins with the
        name of a tool
    """

    def __init__(
        self,
        form: JsonFormat,
        leads: Sequence[str],
        bare: JsonFormat | None = None,
        tools: Tools | None = None,
    ) -> None:
        starts = [f'{{"{field}":' for field in FIRST_FIELDS]
        if bare is not None:
            starts = ["".join(f'{{"name":"{name}"'.split()) for name in tools or ()]
        self._starts = tuple(lead + start for lead in leads for start in starts)
        self._marked, self._bare = form, bare
        super().__init__(form, tools)

    def read(self, *, trim: bool = False) -> Reading[None]:
        while True:
            begins = re.sub(r"\s", "", self.scanner.held[:LONGEST])
            is_bare = begins.startswith(self._starts)
            may_be = any(start.startswith(begins) for start in self._starts)
            if is_bare or not may_be or not (yield from self.scanner.more()):
                break
        if is_bare:
            self.format = self._bare or self._marked
            if fence := FENCE.match(self.scanner.held):
                self.scanner.take(fence.end())
            trim = yield from self.calls()
            self.format = self._marked
        yield from super().read(trim=trim)

    def accepts(self, name: str) -> bool:
        if self._bare is not None:
            return self.format is self._marked or name in self.tools
        return not self.tools or name in self.tools


HermesCalls = partial(BareCalls, HERMES, ("", "```", "```json"), UNMARKED)
"""Reads calls of Hermes and Qwen."""
LlamaCalls = partial(BareCalls, LLAMA, ("",), None)
"""Reads calls of Llama 3."""
ArrayCalls = partial(BareCalls, ARRAY, ("[",), None)
"""Reads calls that are one JSON array, vLLM's format of forced calls."""


def _call_of(fields: Mapping[str, str]) -> _Begun | None:
    """Make the call of an object with these fields, each as JSON text; None: it is no call. The function may
    be an object of its own, as in OpenAI's API."""
    if fields.get("function", "").startswith("{"):
        fields = members(fields["function"])
    name = _text_of(fields.get("name", fields.get("function", "")))
    arguments = next((fields[each] for each in ARGUMENTS if each in fields), "{}")
    return _Begun(name, fields=True, arguments=arguments) if name and arguments.startswith("{") else None


def _name_of(fields: re.Match[str]) -> str | None:
    """Return the name in the first fields of an object; None if these are not JSON."""
    found = JsonObject()
    found.feed(fields[0])
    return None if found.bad else _text_of(fields["quoted"])


def _text_of(quoted: str) -> str | None:
    """Return the text of a JSON string; None if it is not one, or empty."""
    try:
        found = from_json(quoted)
    except ValueError:
        return None
    return found if isinstance(found, str) and found else None
