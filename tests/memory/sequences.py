"""Short ways to bring sequences into a memory."""

from __future__ import annotations

from collections.abc import Sequence

from kvreclaim.memory import BlockKeys, BlockPool, MemoryManager, PrefixMatch
from kvreclaim.memory.blocks import PINNED


def find(
    memory: MemoryManager, tokens: Sequence[int], salt: str | None = None, max_tokens: int | None = None
) -> PrefixMatch:
    """What a new sequence of these tokens hits."""
    return memory.match_prefix(memory.keys(list(tokens), salt), max_tokens=max_tokens)


def run(memory: MemoryManager, seq_id: int, tokens: Sequence[int], salt: str | None = None) -> int:
    """Admit a prompt and write all of it. Returns: tokens that were hit."""
    match = find(memory, tokens, salt)
    assert memory.can_admit(match, len(tokens) - match.num_tokens)
    memory.admit(seq_id, match)
    write(memory, seq_id, tokens[match.num_tokens :])
    return match.num_tokens


def write(memory: MemoryManager, seq_id: int, tokens: Sequence[int]) -> None:
    """Compute the next tokens; those of them that are not known yet become so."""
    assert memory.can_grow(seq_id, len(tokens))
    memory.grow(seq_id, len(tokens))
    table = memory.table(seq_id)
    known = token_list(table.keys)
    ahead = known[table.logical_len :]
    assert list(tokens[: len(ahead)]) == ahead[: len(tokens)], f"{ahead} are known, {tokens} given"
    known += tokens[len(ahead) :]
    memory.commit(seq_id, len(tokens))
    memory.check()


def token_list(keys: BlockKeys) -> list[int]:
    """The list that the keys were made for."""
    tokens = keys._token_ids
    assert isinstance(tokens, list)
    return tokens


def fork(memory: MemoryManager, parent_id: int, child_id: int) -> None:
    """A sibling that goes on by itself."""
    keys = memory.table(parent_id).keys
    memory.fork(parent_id, child_id, keys.fork(token_list(keys).copy()))


def reuse_order(pool: BlockPool) -> list[int]:
    """All queued blocks as they would be reused if nothing else happened."""
    queued, pins = list(pool.free_queue), pool.pins
    free = [block for block in queued if not pool.marks[block] & PINNED]
    return [*pins._due, *free, *pins._kept, *(b for b in queued if pool.marks[b] & PINNED)]
