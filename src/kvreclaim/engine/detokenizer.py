"""Text from tokens, a token at a time: what is printed never changes afterwards."""

from __future__ import annotations

from typing import Any

from tokenizers.decoders import DecodeStream


class Detokenizer:
    """Collects one output's text and looks for stop strings.

    Incomplete UTF-8 is held back until its last byte has come (tokenizers' DecodeStream), or the end.
    """

    def __init__(self, tokenizer: Any, stop_strings: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._token_ids: list[int] = []
        self._stopped = False
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop_strings = stop_strings
        self._longest_stop = max((len(s) for s in stop_strings), default=0)
        self.text = ""

    def append(self, token_id: int, *, may_stop: bool) -> str | None:
        """Add a token. Returns: the stop string that it completed (cut from the text), or None."""
        self._token_ids.append(token_id)
        piece = self._stream.step(self._tokenizer.backend_tokenizer, token_id)
        if not piece:
            return None
        searched_from = max(0, len(self.text) - self._longest_stop + 1)
        self.text += piece
        if not may_stop:
            return None
        found = [(self.text.find(s, searched_from), s) for s in self._stop_strings]
        hits = [(at, s) for at, s in found if at >= 0]
        if not hits:
            return None
        at, stop = min(hits)
        self.text = self.text[:at]
        self._stopped = True
        return stop

    def finish(self) -> None:
        """No token follows: show what was held back."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=True)
        if not self._stopped and whole.startswith(self.text):
            self.text = whole
