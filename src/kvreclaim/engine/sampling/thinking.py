"""Where an output stands in its reasoning: how many tokens it has, and when a budget ends it."""

from __future__ import annotations

from typing import Any

from kvreclaim.engine.sampling.detokenizer import TextStream
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.parsers.scanner import overlap
from kvreclaim.parsers.thinking import ThinkSpan

FIELD = "thinking_token_budget"


class ThinkTracker:
    """Reads one output token by token, as parsers/thinking.py reads its text.

    budget: after so many tokens of reasoning what ends it is forced; None: never
    forced: the token that must come next; None: any may
    inside: the next token belongs to the reasoning
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
        self.inside = span.begun
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
        if self._over:
            return
        self._text += self._stream.step(token)
        if self._queue:
            self._queue.pop(0)
        elif self.inside:
            self._ends.append(len(self._text))
        if self._begins:
            self._read_beginning()
        while not self._begins and not self._over and self._read_on():
            pass
        self._force()

    def _force(self) -> None:
        if self.inside and not self._queue and self._budget is not None and self.num_tokens >= self._budget:
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
        marker = self._form.closing if self.inside else self._form.opening
        place = self._text.find(marker)
        if place < 0:
            self._settle(len(self._text) - overlap(self._text, marker))
            return False
        if self.inside:
            self._settle(place)
            self._ends, self.inside, self._over = [], False, not self._form.again
            self._text = self._text[len(marker) :]
        else:
            self._enter(self._text[place + len(marker) :])
        return True

    def _enter(self, rest: str) -> None:
        self._text, self._ends, self.inside = rest, [], True

    def _settle(self, end: int) -> None:
        """The text up to here is no part of a marker."""
        left = [each - end for each in self._ends if each > end]
        self._num_settled += len(self._ends) - len(left)
        self._ends, self._text = left, self._text[end:]


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
