"""Harmony, the format of GPT-OSS: messages in channels, some of them for a function.

Source: https://cookbook.openai.com/articles/openai-harmony
"""

from __future__ import annotations

import re

from kvreclaim.parsers.parser import Parser, Tools
from kvreclaim.parsers.pieces import Arguments, CallBegin, Reasoning, Text
from kvreclaim.parsers.scanner import Reading
from kvreclaim.parsers.thinking import ThinkFormat

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
MARKERS = (START, CHANNEL, *ENDS)
NAME = r"[^\s<]"
RECIPIENT = re.compile(rf"to=({NAME}+)")
LONGEST = 512
"""Characters of a message's head."""
ANALYSIS = ThinkFormat(
    f"{CHANNEL}analysis{MESSAGE}",
    ENDS[0],
    ends=f"{ENDS[0]}{START}assistant{CHANNEL}final{MESSAGE}",
    again=True,
    others=(START, f"{CHANNEL}commentary"),
    answer=MESSAGE,
)


class Harmony(Parser):
    """The channel `analysis` is reasoning; a message to a function is a call; all others are text.

    calls, reasoning: whether to parse them; otherwise they are text, too
    begun:            the prompt ends within a message of reasoning
    """

    def __init__(
        self, tools: Tools | None = None, *, calls: bool = True, reasoning: bool = True, begun: bool = False
    ) -> None:
        self.calls, self.reasoning, self.begun = calls, reasoning, begun
        super().__init__(tools)

    @property
    def markers(self) -> tuple[str, ...]:
        return MARKERS

    @property
    def names(self) -> re.Pattern[str]:
        return re.compile(rf"{NAME}{{1,128}}")

    def read(self) -> Reading[None]:
        scanner = self.scanner
        kind = Reasoning if self.begun and self.reasoning else Text
        marker = yield from scanner.text_until(*MARKERS, trim=kind is Reasoning, kind=kind)
        while marker is not None:
            if marker in ENDS:
                marker = yield from scanner.text_until(*MARKERS)
                continue
            head = yield from self._head()
            if head is None:
                scanner.release()
                marker = yield from scanner.text_until(*MARKERS)
            elif self.calls and (recipient := RECIPIENT.search(head)):
                marker = yield from self._call(self.own_name(recipient[1]))
            else:
                thinks = self.reasoning and re.search(r"<\|channel\|>\s*analysis", head)
                kind = Reasoning if thinks else Text
                marker = yield from scanner.text_until(*MARKERS, kind=kind)

    def _head(self) -> Reading[str | None]:
        """Read up to a message's content. Returns: None if there is no message; nothing is consumed then."""
        scanner = self.scanner
        while (place := scanner.held.find(MESSAGE, 0, LONGEST)) < 0:
            if len(scanner.held) > LONGEST or not (yield from scanner.more()):
                return None
        scanner.take(place + len(MESSAGE))
        return scanner.taken

    def _call(self, name: str) -> Reading[str | None]:
        """Read a call's arguments. Returns: the marker after them."""
        scanner = self.scanner
        while any(end.startswith(scanner.held.strip()) for end in ENDS) and (yield from scanner.more()):
            pass
        scanner.take(len(scanner.held) - len(scanner.held.lstrip()))
        scanner.pieces.append(CallBegin(name))
        if scanner.held.startswith(ENDS) or not scanner.held:
            scanner.pieces.append(Arguments("{}"))
            complete = True
        else:
            complete = yield from scanner.stream_object()
        scanner.end_call(complete=complete)
        return (yield from scanner.text_until(*MARKERS, trim=complete))
