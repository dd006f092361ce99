"""Single tokens as text and bytes: what each adds to the surrounding text."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from kvreclaim.engine.api.exports import Tokenizer
from kvreclaim.engine.sampling.detokenizer import TextStream

BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(NamedTuple):
    """Text and UTF-8 bytes that a token adds. A partial character is U+FFFD and its own bytes; a special
    token, which adds nothing, is given by name."""

    text: str
    bytes: tuple[int, ...]
    special: bool = False


class TokenPlace(NamedTuple):
    """Position of a token.

    offset: characters before it
    first:  only special tokens precede it
    """

    own: Spelling
    offset: int
    first: bool


class Vocabulary:
    """Cached spellings of a tokenizer's tokens; thread-safe.

    skip_special_tokens: special tokens add nothing to a text
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._known: dict[int, tuple[Spelling, Spelling]] = {}

    def spelling(self, token_id: int, *, first: bool) -> Spelling:
        """Return the spelling of a token: first in a text, where it may lose its space, or after others."""
        if (known := self._known.get(token_id)) is None:
            known = self._known[token_id] = self._spell(token_id)
        return known[first]

    def _spell(self, token_id: int) -> tuple[Spelling, Spelling]:
        """Return the spellings after other tokens, and first in a text."""
        decode, skips = self.tokenizer.backend_tokenizer.decode, self.skip_special_tokens
        alone, twice = (decode([token_id] * n, skip_special_tokens=skips) for n in (1, 2))
        if not twice:
            name = Spelling(decode([token_id], skip_special_tokens=False), (), special=True)
            return name, name
        # Partial characters that join to one are spelled as the token alone.
        added = twice[len(alone) :] if twice.startswith(alone) else alone
        return Spelling(added, self._bytes(token_id, added)), Spelling(alone, self._bytes(token_id, alone))

    def _bytes(self, token_id: int, text: str) -> tuple[int, ...]:
        if "�" not in text:
            return tuple(text.encode())
        piece = str(self.tokenizer.convert_ids_to_tokens(token_id))
        if found := BYTE_PIECE.fullmatch(piece):
            return (int(found[1], 16),)
        codes = byte_level_codes()
        known = all(character in codes for character in piece)
        return tuple(codes[character] for character in piece) if known else tuple(text.encode())


@cache
def byte_level_codes() -> dict[str, int]:
    """Bytes of the characters of a byte-level BPE vocabulary: printable Latin-1 maps to itself, all other
    bytes follow in order from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class TokenPlaces:
    """Tracks the positions of tokens in a text, one token at a time."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._stream = TextStream(vocabulary.tokenizer, skip_special_tokens=vocabulary.skip_special_tokens)
        self._length = 0
        self._first = True

    def append(self, token_id: int) -> TokenPlace:
        first, before = self._first, self._length
        own, piece = self.vocabulary.spelling(token_id, first=first), self._stream.step(token_id)
        self._length += len(piece)
        self._first = first and own.special
        # A token may complete a piece that started with partial characters.
        return TokenPlace(own, self._length - len(own.text) if piece.endswith(own.text) else before, first)


class Continuation:
    """Separately decoded answer text, adjusted to continue its prompt."""

    def __init__(self, vocabulary: Vocabulary, prompt: list[int]) -> None:
        self._vocabulary = vocabulary
        self._joined = self._begun_by(prompt) is None

    def take(self, token_ids: list[int], text: str) -> str:
        """Return the next tokens' text; the first piece gets what decoding alone loses, such as a space."""
        token_id = None if self._joined else self._begun_by(token_ids)
        if token_id is None:
            return text
        self._joined = True
        alone, added = (self._vocabulary.spelling(token_id, first=first).text for first in (True, False))
        return added.removesuffix(alone) + text

    def _begun_by(self, token_ids: list[int]) -> int | None:
        """Return the first token that adds text."""
        spell = self._vocabulary.spelling
        return next((token for token in token_ids if not spell(token, first=True).special), None)
