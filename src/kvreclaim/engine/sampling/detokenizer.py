"""Text from tokens, a token at a time: what is printed never changes afterwards."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """The text that each token completes; special tokens add none where they are skipped."""

    def __init__(self, tokenizer: Any, *, skip_special_tokens: bool = True) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=self._skip)

    def step(self, token_id: int) -> str:
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception as error:
            if "Invalid prefix" not in str(error):
                raise
            # A byte-fallback vocabulary (Llama 2, Gemma) decodes a run of bytes as a whole: one that is
            # no UTF-8 unmakes text that was printed already. What is printed stays; begin anew.
            self._stream = DecodeStream(skip_special_tokens=self._skip)
            return self._stream.step(self._backend, token_id) or ""


class Detokenizer:
    """Collects one output's text and looks for stop strings.

    Held back until more comes, or the end: incomplete UTF-8 (tokenizers' DecodeStream), and what may be
    the beginning of a stop string that is to be cut.

    include_stop: the text ends with the stop string, not before it
    """

    def __init__(
        self,
        tokenizer: Any,
        stop_strings: tuple[str, ...],
        *,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._stopped = False
        self._skip = skip_special_tokens
        self._stream = TextStream(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stop_strings, self._include_stop = stop_strings, include_stop
        self._whole = ""
        self._answer = 0
        self.text = ""

    def append(
        self, token_id: int, *, may_stop: bool, num_answer: int | None = None, is_unsure: bool = False
    ) -> str | None:
        """Add a token. Stop strings end the answer only, not the reasoning in front of it.

        num_answer: the last characters of the text that belong to the answer; None: the answer begins where
                    it began before
        is_unsure:  whether the text is an answer is not known yet

        Returns: the stop string that it completed, at which the text ends, or None.
        """
        self._token_ids.append(token_id)
        piece = self._stream.step(token_id)
        before = len(self._whole)
        self._whole += piece
        if num_answer is not None:
            self._answer = max(len(self._whole) - (num_answer if piece else 0), 0)
        if not piece or (is_unsure and self._stop_strings):
            return None
        if not self._stop_strings:
            self.text = self._whole
            return None
        # From where a stop string would have to begin to end in this piece: one that was complete
        # before, when it might not stop yet, does not stop now.
        old = self._answer if num_answer else before
        found = [(self._whole.find(s, max(self._answer, old - len(s) + 1)), s) for s in self._stop_strings]
        hits = [(at, s) for at, s in found if at >= 0] if may_stop else []
        if not hits:
            self.text = self._whole[: len(self._whole) - self._num_held_back()]
            return None
        at, stop = min(hits)
        self.text = self._whole[: at + len(stop) if self._include_stop else at]
        self._stopped = True
        return stop

    def _num_held_back(self) -> int:
        """Return the number of characters at the end that may be the beginning of a stop string."""
        if self._include_stop:
            return 0
        longest = max((len(s) for s in self._stop_strings), default=1) - 1
        lengths = range(min(longest, len(self._whole) - self._answer), 0, -1)
        ends = (
            n for n in lengths if any(s[:n] == self._whole[-n:] for s in self._stop_strings if len(s) > n)
        )
        return next(ends, 0)

    def finish(self) -> None:
        """Add the text that was held back. Call it after the last token."""
        if self._stopped:
            return
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip)
        self.text = whole if whole.startswith(self._whole) else self._whole
