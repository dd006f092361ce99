"""Keep a user's text from being tokenized as control tokens such as <|im_end|>."""

from __future__ import annotations

import re
import secrets
from functools import cached_property
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kvreclaim.model.loader import Tokenizer


class PlainText:
    """Breaks control tokens in users' texts with a mark, before a template adds its own control tokens.

    A copy of the tokenizer has the mark as a token, so it splits the text there. The mark's ids are dropped.
    Nothing else changes, and text without control tokens uses the original tokenizer. A control token of one
    character cannot be broken.
    """

    def __init__(self, tokenizer: Tokenizer, *, allow: bool = False) -> None:
        """allow: tokenize text as control tokens, without marks"""
        self.tokenizer = tokenizer
        self._mark = f"x{secrets.token_hex(12)}x"  # letters and digits: filters of templates leave them alone
        added = sorted(tokenizer.added_tokens_decoder.values(), key=lambda token: -len(token.content))
        control = [_pattern(token) for token in added if token.special and len(token.content) > 1]
        self._control = re.compile("|".join(control)) if control and not allow else None

    def guard(self, value: Any) -> Any:
        """Return the JSON value with marks in its strings, including the names of fields."""
        if self._control is None:
            return value
        if isinstance(value, str):
            return self._control.sub(lambda found: found[0][0] + self._mark + found[0][1:], value)
        if isinstance(value, dict):
            return {self.guard(name): self.guard(each) for name, each in value.items()}
        return [self.guard(each) for each in value] if isinstance(value, list) else value

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a template's text with guarded values."""
        if self._mark not in text:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return self.encode_with_ends(text)[0]

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the token ids, and the end of each token in the text."""
        if self._mark not in text:
            encoding = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            return list(encoding["input_ids"]), [end for _, end in encoding["offset_mapping"]]
        backend, mark_id = self._marking
        [found] = backend.encode_batch([text], add_special_tokens=False)  # a batch lets other threads run
        both = [(token, end) for token, (_, end) in zip(found.ids, found.offsets, strict=True)]
        kept = [(token, end) for token, end in both if token != mark_id]
        return [token for token, _ in kept], [end for _, end in kept]

    @cached_property
    def _marking(self) -> tuple[Backend, int]:
        """A copy of the tokenizer that knows the mark, and the mark's id."""
        backend = Backend.from_str(self.tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        backend.add_special_tokens([AddedToken(self._mark, special=True, normalized=False)])
        mark_id = backend.token_to_id(self._mark)
        assert mark_id is not None
        return backend, mark_id


def _pattern(token: AddedToken) -> str:
    """Return a pattern for the token. A token that is matched in normalized text may have any case."""
    return f"(?i:{re.escape(token.content)})" if token.normalized else re.escape(token.content)
