"""The key of a compressed prefix, the same in every process."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kvreclaim.memory.prefix.keys import root_uid
from kvreclaim.schedule.budget.drops import Span, beyond

LINK = 64
"""Tokens between two hashes of a chain."""


@dataclass(frozen=True)
class SnapshotKey:
    """All that a compressed prefix depends on, besides what blocks depend on, too (Namespace).

    salt:   of the request; only those with the same one find it
    recipe: how it was made, as text that says the same in every process
    tokens: that were computed, packed, 8 bytes each
    is_lasting: False where the recipe means something in this process alone, or there are drops, which no
            file's name says: it never lies on disk
    has_past: whether what it names may depend on earlier requests, too: it was left by one that ended, or
              that had begun with such a prefix
    drops:  spans that the caller has dropped of these tokens, or, of a sequence to come, will
    """

    salt: str | None
    recipe: str
    tokens: bytes
    is_lasting: bool = True
    has_past: bool = False
    drops: tuple[Span, ...] = ()

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 8

    @property
    def token_ids(self) -> list[int]:
        return array("q", self.tokens).tolist()

    def begins(self, other: SnapshotKey) -> bool:
        """Whether it names what is left of the other one's beginning; the other one may drop more."""
        same = self.salt == other.salt and self.recipe == other.recipe
        return same and other.tokens.startswith(self.tokens) and not beyond(self.drops, other.drops)

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """Hashes of its first 0, LINK, 2 * LINK, ... tokens behind salt and recipe, for this process."""
        links = [hash((self.salt, self.recipe))]
        for end in range(8 * LINK, len(self.tokens) + 1, 8 * LINK):
            links.append(hash((links[-1], self.tokens[end - 8 * LINK : end])))
        return tuple(links)

    def of_first(self, num_tokens: int) -> SnapshotKey:
        """The key of what is left of its first tokens."""
        return replace(self, tokens=self.tokens[: 8 * num_tokens])

    @cached_property
    def salt_uid(self) -> str:
        """In place of the salt, which is a secret."""
        return root_uid(self.salt).hex()

    @cached_property
    def name(self) -> str:
        """64 hexadecimal digits; what bears it is compared with the key itself."""
        return self.names([self.num_tokens])[0]

    def names(self, lengths: Iterable[int]) -> list[str]:
        """The names of the keys of so many of its first tokens, ascending. The first eight digits of a name
        are the number of tokens."""
        digest, found, before = hashlib.sha256(b"compressed prefix"), [], 0
        for field in (self.salt_uid.encode(), self.recipe.encode(), bytes([self.has_past])):
            digest.update(len(field).to_bytes(8, "little") + field)
        for length in lengths:
            digest.update(self.tokens[8 * before : 8 * length])
            found.append(f"{length:08x}{digest.copy().hexdigest()[:56]}")
            before = length
        return found


def length_in(name: str) -> int:
    """The number of tokens that a name tells of."""
    return int(name[:8], 16)
