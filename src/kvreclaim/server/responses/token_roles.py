"""Separates the tokens of an answer's texts from reasoning, calls and markers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvreclaim.engine.sampling.detokenizer import TextStream
from kvreclaim.parsers.formats import Splitter
from kvreclaim.parsers.pieces import Arguments, CallBegin, CallEnd, Piece, Reasoning, Text
from kvreclaim.server.base.vocabulary import Vocabulary

Logprobs = list[dict[str, Any]]


class TextTokens:
    """Follows an output token by token, independent of how updates split it.

    splitter: used only here
    whole:    an invalid call is text, as in a whole answer

    Tokens wait until the splitter has classified them. A text takes the latest tokens that cover its
    characters, which excludes white space and markers before it.
    """

    def __init__(self, splitter: Splitter, vocabulary: Vocabulary, *, whole: bool) -> None:
        self._splitter = splitter
        self._whole = whole
        self._calls = False
        self._stream = TextStream(vocabulary.tokenizer, skip_special_tokens=vocabulary.skip_special_tokens)
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._message = -1
        self._speaks = False

    def of_messages(
        self, token_ids: Iterable[int], logprobs: Logprobs, *, last: bool
    ) -> list[tuple[int, Logprobs]]:
        """Yield (message index, log-probabilities of its next tokens). logprobs: of all tokens."""
        found = []
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            text = self._stream.step(token_id)
            self._waiting.append((len(text), entry))
            settled = self._settled(text, last=False)
            found.append((self._message, settled))
        if last:
            settled = self._settled("", last=True)
            found.append((self._message, settled))
        return found

    def _settled(self, text: str, *, last: bool) -> Logprobs:
        """Return the log-probabilities of the waiting tokens that are now classified."""
        num_chars, pieces = 0, self._splitter.take(text, last=last)
        for piece in map(self._meant, pieces):
            if isinstance(piece, Text):
                num_chars += len(piece.text)
                self._message += piece.text != "" and not self._speaks
                self._speaks |= piece.text != ""
            elif isinstance(piece, CallEnd) or (isinstance(piece, Reasoning) and piece.text):
                self._speaks = False
        taken: Logprobs = []
        while self._waiting and (num_chars > 0 or (taken and not self._waiting[-1][0])):
            size, entry = self._waiting.pop()
            num_chars -= size
            if size or taken:  # excludes a marker after the text, such as its end
                taken.append(entry)
        if pieces and not self._calls:
            self._waiting.clear()
        return taken[::-1]

    def _meant(self, piece: Piece) -> Piece:
        """Return the piece, or its text in a whole answer."""
        if self._whole and isinstance(piece, CallBegin | Arguments | CallEnd):
            self._calls = not isinstance(piece, CallEnd)
            if isinstance(piece, CallEnd) and piece.broken is not None and not piece.is_cut:
                return Text(piece.broken)
        return piece
