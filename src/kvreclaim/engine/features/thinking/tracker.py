"""Track the reasoning of an output: its number of tokens, and its end by a budget."""

from __future__ import annotations

from typing import Any

from kvreclaim.engine.sampling.detokenizer import TextStream
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.formats import calls_in_reasoning
from kvreclaim.parsers.pieces import CallBegin
from kvreclaim.parsers.scanner import overlap
from kvreclaim.parsers.thinking import ThinkSpan

FIELD = "thinking_token_budget"


class ThinkTracker:
    """Reads one output token by token, as parsers/thinking.py reads its text.

    budget: after so many tokens of reasoning what ends it is forced; None: never
    forced: the token that must come next; None: any may
    inside: the next token belongs to the reasoning
    is_unsure:  it is not known yet whether the output begins with reasoning
    num_answer: the last characters of the text so far that belong to the answer, 0 within reasoning; None: as
                after the token before, and all that has come since
    """

    def __init__(self, span: ThinkSpan, tokenizer: Any, budget: int | None = None) -> None:
        self._form, self._budget = span.form, budget
        self._stream = TextStream(tokenizer, skip_special_tokens=False)
        self._ending = [] if budget is None else closing_ids(span, tokenizer)
        self._queue: list[int] = []
        self._text = ""
        self._ends: list[int] = []
        self._num_settled = 0
        self._begins, self._over = True, False
        make = calls_in_reasoning(span.calls)
        self._calls = None if make is None else make()
        self._num_read = 0
        self._follows = False
        self.inside, self.is_unsure = span.begun, not span.begun
        self.num_answer: int | None = None
        self._force()

    @property
    def num_tokens(self) -> int:
        """Tokens of reasoning so far, its markers not among them."""
        return self._num_settled + len(self._ends)

    @property
    def forced(self) -> int | None:
        return self._queue[0] if self._queue else None

    def take(self, token: int) -> None:
        """Take the next token into account."""
        if self._over and not self._follows:
            self.num_answer = None
            return
        self._text += self._stream.step(token)
        size = len(self._text)
        if self._queue:
            self._queue.pop(0)
        elif self.inside:
            self._ends.append(size)
        if self._begins:
            self._read_beginning()
        while not self._begins and not self._over and self._read_on():
            pass
        self._force()
        self._find_answer(size)

    def _find_answer(self, size: int) -> None:
        """Find where the answer begins, of a text of so many characters."""
        was_unsure, self.is_unsure = self.is_unsure, self._begins and not self.inside
        self.num_answer = size if was_unsure and not self.is_unsure else None
        if self.inside:
            self._follows, self.num_answer = True, 0
        elif self._follows:
            place, marker = self._text.find(self._form.answer), self._form.answer
            rest = "" if place < 0 else self._text[place + len(marker) :].lstrip()
            self._follows, self.num_answer = not rest, len(rest)

    def _force(self) -> None:
        if self._budget is None or not self.inside or self._queue:
            return
        waits = self._calls is not None and self._calls.may_be_call
        if self.num_tokens >= self._budget and not waits:
            self._queue = list(self._ending)

    def _read_beginning(self) -> None:
        """Look for the opening marker in front; where the prompt has it, another one is left out, too."""
        opening, begun = self._form.opening, self._text.lstrip()
        if begun.startswith(opening):
            self._enter(begun[len(opening) :])
        elif not opening.startswith(begun):
            self._over = not (self.inside or self._form.again)
        else:
            return
        self._begins = False

    def _read_on(self) -> bool:
        """Look for the next marker. Returns: whether to look once more."""
        form, text = self._form, self._text
        if not self.inside:
            place = text.find(form.opening)
            if place >= 0:
                self._enter(text[place + len(form.opening) :])
            elif not self._follows:
                self._settle(len(text) - overlap(text, form.opening))
            return place >= 0
        ends = (form.closing, *form.others)
        place, marker = min(((text.find(m), m) for m in ends if m in text), default=(-1, ""))
        certain = place if marker else len(text) - max(overlap(text, each) for each in ends)
        if self._calls is not None:
            new, self._num_read = text[self._num_read : certain], certain
            if any(isinstance(piece, CallBegin) for piece in self._calls.feed(new)):
                self._leave(0)
                return False
            if not marker:
                certain -= self._calls.num_held
        self._settle(certain)
        if not marker:
            return False
        self._leave(len(marker) if marker == form.closing else 0)
        return True

    def _leave(self, size: int) -> None:
        """Reasoning ends at the beginning of the text, with a marker of so many characters."""
        self._ends, self.inside, self._over = [], False, not self._form.again
        self._text = self._text[size:]

    def _enter(self, rest: str) -> None:
        self._text, self._ends, self.inside = rest, [], True

    def _settle(self, end: int) -> None:
        """The text up to here is no part of a marker."""
        left = [each - end for each in self._ends if each > end]
        self._num_settled += len(self._ends) - len(left)
        self._ends, self._text = left, self._text[end:]
        self._num_read = max(self._num_read - end, 0)


def closing_ids(span: ThinkSpan, tokenizer: Any) -> list[int]:
    """The tokens that end the reasoning. Raises: InvalidArgumentError where the model cannot write them."""
    ids = list(tokenizer.encode(span.form.ending, add_special_tokens=False))
    if span.form.closing not in tokenizer.decode(ids, skip_special_tokens=False):
        raise InvalidArgumentError(
            f"{FIELD} is set, but this model's tokens cannot write {span.form.ending!r}, which ends the "
            "reasoning; leave it out.",
            field=FIELD,
        )
    return ids
