"""The key of a compressed prefix, the same in every process."""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from functools import cached_property

from kvreclaim.memory.prefix.keys import root_uid


@dataclass(frozen=True)
class SnapshotKey:
    """All that a compressed prefix depends on, besides what blocks depend on, too (Namespace).

    salt:   of the request; only those with the same one find it
    recipe: how it was made, as text that says the same in every process
    tokens: that were computed, packed, 8 bytes each
    is_lasting: False where the recipe means something in this process alone
    """

    salt: str | None
    recipe: str
    tokens: bytes
    is_lasting: bool = True

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // 8

    @property
    def token_ids(self) -> list[int]:
        return array("q", self.tokens).tolist()

    @cached_property
    def salt_uid(self) -> str:
        """In place of the salt, which is a secret."""
        return root_uid(self.salt).hex()

    @cached_property
    def name(self) -> str:
        """64 hexadecimal digits; what bears it is compared with the key itself."""
        digest = hashlib.sha256(b"compressed prefix")
        for field in (self.salt_uid.encode(), self.recipe.encode(), self.tokens):
            digest.update(len(field).to_bytes(8, "little") + field)
        return digest.hexdigest()
