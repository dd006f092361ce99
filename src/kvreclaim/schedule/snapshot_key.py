"""The key of a compressed prefix, equal in every process."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from kvreclaim.memory.prefix.index import root_uid
from kvreclaim.schedule.budget.drops import Span, beyond

LINK = 64
"""Tokens between two hashes of a chain."""


@dataclass(frozen=True)
class SnapshotKey:
    """Everything a compressed prefix depends on, besides what its blocks depend on (Namespace).

    salt:   of the request; prefixes are only shared within a salt
    recipe: how it was made, as text that is equal in every process
    tokens: computed ones, packed, 8 bytes each
    is_lasting: False if the recipe is valid only in this process, or there are drops, which file names do not
            record: it is never stored on disk
    has_past: whether it may depend on earlier requests: it was kept from a finished one, or from one that
              had started with such a prefix
    drops:  spans that the caller has dropped of these tokens, or will drop
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
        """Whether it is a compressed prefix of the other key; the other one may drop more."""
        same = self.salt == other.salt and self.recipe == other.recipe
        return same and other.tokens.startswith(self.tokens) and not beyond(self.drops, other.drops)

    @cached_property
    def chain(self) -> tuple[int, ...]:
        """Hashes of its first 0, LINK, 2 * LINK, ... tokens after salt and recipe, for this process."""
        links = [hash((self.salt, self.recipe))]
        for end in range(8 * LINK, len(self.tokens) + 1, 8 * LINK):
            links.append(hash((links[-1], self.tokens[end - 8 * LINK : end])))
        return tuple(links)

    def of_first(self, num_tokens: int) -> SnapshotKey:
        """Return the key of its compressed first tokens."""
        return replace(self, tokens=self.tokens[: 8 * num_tokens])

    @cached_property
    def salt_uid(self) -> str:
        """Replaces the salt, which is a secret."""
        return root_uid(self.salt).hex()

    @cached_property
    def name(self) -> str:
        """64 hexadecimal digits; content is always compared with the key itself."""
        return self.names([self.num_tokens])[0]

    def names(self, lengths: Iterable[int]) -> list[str]:
        """Return the names for these numbers of leading tokens, ascending. The first eight digits are the
        number of tokens."""
        digest, found, before = hashlib.sha256(b"compressed prefix"), [], 0
        for field in (self.salt_uid.encode(), self.recipe.encode(), bytes([self.has_past])):
            digest.update(len(field).to_bytes(8, "little") + field)
        for length in lengths:
            digest.update(self.tokens[8 * before : 8 * length])
            found.append(f"{length:08x}{digest.copy().hexdigest()[:56]}")
            before = length
        return found


def length_in(name: str) -> int:
    """Return the number of tokens encoded in a name."""
    return int(name[:8], 16)
