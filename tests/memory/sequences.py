"""Short ways to bring sequences into a memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.memory import MemoryManager


@dataclass(frozen=True)
class Plan:
    seq_id: int
    num_tokens: int
    targets: tuple[int | None, ...]
    strip: tuple[int, ...] = ()


def run(memory: MemoryManager, seq_id: int, tokens: Sequence[int], salt: str | None = None) -> int:
    """Admit a prompt and write all of it. Returns: tokens that were hit."""
    match = memory.match_prefix(tokens, cache_salt=salt)
    assert memory.can_admit(match, len(tokens) - match.num_tokens)
    memory.admit(seq_id, match, token_ids=tokens, cache_salt=salt)
    write(memory, seq_id, tokens[match.num_tokens :])
    return match.num_tokens


def write(memory: MemoryManager, seq_id: int, tokens: Sequence[int]) -> None:
    assert memory.can_grow(seq_id, len(tokens))
    memory.grow(seq_id, len(tokens))
    memory.commit(seq_id, tokens)
    memory.check()
