"""Stretches of a text at many offsets, as tokens."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from kvreclaim.calibrate.calibration import check_known
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.loader import Tokenizer

GOLDEN = 0.6180339887498949
"""Golden ratio: multiples of it, modulo 1, are evenly spread for any count."""


def spread_order(count: int) -> list[int]:
    """Order 0 .. count - 1 so that every prefix is evenly spread."""
    by_place = sorted(range(count), key=lambda number: number * GOLDEN % 1)
    order = [0] * count
    for place, number in enumerate(by_place):
        order[number] = place
    return order


def woven(
    rng: random.Random, passage: list[int], facts: Sequence[list[int]], *, together: bool = False
) -> tuple[list[int], list[int]]:
    """Insert facts at random places, or all at one. Returns: tokens, and the start of each fact."""
    cuts = sorted(rng.sample(range(1, len(passage)), 1 if together else len(facts)))
    cuts = cuts * len(facts) if together else cuts
    starts: list[int] = []
    tokens: list[int] = []
    for fact, begin, end in zip(facts, [0, *cuts], cuts, strict=False):
        tokens += passage[begin:end]
        starts.append(len(tokens))
        tokens += fact
    return tokens + passage[cuts[-1] :], starts


@dataclass(frozen=True)
class Passages:
    """A text with more windows than disjoint ones: they overlap and start at evenly spread offsets.

    tokens: of the whole text, without special tokens
    prefix: tokens that the tokenizer puts before every text (its begin token), or nothing
    """

    tokens: tuple[int, ...] = field(repr=False)
    prefix: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, text: str) -> Passages:
        """Raises: InvalidArgumentError for a text that the tokenizer does not know."""
        begin = tokenizer.bos_token_id
        prefix = (begin,) if begin is not None and begin in tokenizer.encode("") else ()
        tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
        check_known(tokens, tokenizer.unk_token_id, "the model", "the text")
        return cls(tokens, prefix)

    @classmethod
    def read(cls, tokenizer: Tokenizer, path: Path) -> Passages:
        """Raises: InvalidArgumentError for a file that is missing or not UTF-8, and what `of` raises."""
        try:
            return cls.of(tokenizer, path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"the text {str(path)!r} cannot be read: {error}.") from error

    @cached_property
    def digest(self) -> str:
        """Digest of everything that determines the windows."""
        return hashlib.sha256(repr((self.tokens, self.prefix)).encode()).hexdigest()[:24]

    def check_room(self, num_tokens: int) -> int:
        """Count the possible offsets of a window. Raises: InvalidArgumentError if the text is shorter."""
        if num_tokens > len(self.tokens):
            raise InvalidArgumentError(
                f"the text has {len(self.tokens)} tokens, less than one window of {num_tokens}; pass a "
                "longer text or lower the number of tokens."
            )
        return len(self.tokens) - num_tokens + 1

    def window(self, number: int, num_tokens: int) -> list[int]:
        """Return window `number`. Raises: InvalidArgumentError if the text is shorter."""
        start = int(number * GOLDEN % 1 * self.check_room(num_tokens))
        return list(self.tokens[start : start + num_tokens])
