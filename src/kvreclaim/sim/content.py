"""Contents of a simulated prompt: ids of whole pieces instead of tokens, and the keys of its blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import zip_longest
from struct import Struct
from typing import Any

from kvreclaim.checks import require
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.prefix.index import BlockKey, BlockKeys, BlockName, root_uid, uid_of

_KEY = Struct("<qq")


class TraceTokens(bytearray):
    """Tokens of a prompt, of which only the number matters, and names of their content.

    ids:      of the prompt's pieces of `piece` tokens, the last one maybe not full; equal ids, equal tokens
    tail:     names what follows the last whole block of these: its own, or that of a conversation
    num_ids:  tokens that ids stand for; the rest of the prompt is the tail's
    is_own:   the tail is no other request's
    """

    ids: Sequence[Hashable] = ()
    piece: int = 512
    tail: Hashable = None
    num_ids: int = 0
    is_own: bool = True


class Links:
    """Numbers for all that can begin a prompt, so that equal beginnings of whole pieces have equal numbers.
    One for all replicas: a walk costs one look-up a piece, once a request.

    block_size: tokens per block; a piece is a multiple of it
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._known: dict[tuple[int, int, Hashable], int] = {}

    def walk(self, tokens: TraceTokens) -> tuple[list[int], list[int]]:
        """Returns: the number of each piece behind those before it, the tail's last; the blocks of each but
        the tail, which has no end."""
        size, piece = self.block_size, tokens.piece
        require(
            piece % size == 0,
            f"block_size is {size}, but the trace names pieces of {piece} tokens; use a divisor of {piece}.",
            "block_size",
        )
        known, last, blocks = self._known, -1, piece // size
        numbers, counts, left, before = [], [], tokens.num_ids, 0
        for content in tokens.ids:
            last = known.setdefault((last, before, content), len(known))
            before = blocks if left >= piece else left // size
            numbers.append(last)
            counts.append(before)
            left -= piece
        numbers.append(known.setdefault((last, -1 - before, tokens.tail), len(known)))
        return numbers, counts


class TraceKeys(BlockKeys):
    """The keys of a simulated sequence's blocks: numbers of Links, no hash. The same tokens in the same place
    have the same key, and sequences with one tail find each other's."""

    __slots__ = ("_counts", "_num_whole", "_numbers", "_size", "_tokens")

    def __init__(self, links: Links, tokens: TraceTokens) -> None:
        self.salt, self.lasting = None, True
        self._size, self._tokens = links.block_size, tokens
        self._numbers, self._counts = links.walk(tokens)
        self._num_whole = sum(self._counts)
        self._uids = [root_uid(None)]
        self._known: list[BlockKey] = []

    @property
    def block_size(self) -> int:
        return self._size

    @property
    def has_own_tail(self) -> bool:
        """No other request has the tokens after the prompt."""
        return self._tokens.is_own

    @property
    def num_tokens(self) -> int:
        return len(self._tokens)

    def num_shared(self, other: BlockKeys, most: int) -> int:
        assert isinstance(other, TraceKeys), f"{type(other).__name__} are no keys of a trace"
        found, pieces = 0, zip(self._numbers, other._numbers, strict=False)
        counts = zip(self._counts, other._counts, strict=False)
        for (mine, theirs), pair in zip_longest(pieces, counts, fillvalue=(most, most)):
            if mine != theirs:
                break
            found += min(pair)
        return min(found, most)

    def __getitem__(self, index: int) -> BlockKey:
        known = self._known
        if index >= len(known):
            pack, tail = _KEY.pack, self._numbers[-1]
            if not known:
                for number, count in zip(self._numbers, self._counts, strict=False):
                    known.extend(BlockKey(key, key) for key in (pack(number, i) for i in range(count)))
            places = range(len(known) - self._num_whole, index + 1 - self._num_whole)
            known.extend(BlockKey(key, key) for key in (pack(tail, i) for i in places))
        return known[index]

    def name(self, index: int) -> BlockName:
        uids = self._uids
        for i in range(len(uids) - 1, index + 1):
            uids.append(uid_of(uids[i], self[i].tokens))
        key = self[index]
        parent = self[index - 1].digest if index else b""
        return BlockName(key.digest, parent, uids[index + 1], uids[index], index, key.tokens)


class TraceMemory(MemoryManager):
    """The memory manager of a simulated replica. links: numbers of the trace's contents"""

    def __init__(self, num_blocks: int, block_size: int, links: Links, **others: Any) -> None:
        super().__init__(num_blocks, block_size, **others)
        self._links = links

    def keys(self, token_ids: Any, cache_salt: str | None = None, *, lasting: bool = True) -> TraceKeys:
        assert isinstance(token_ids, TraceTokens), f"{type(token_ids).__name__} are no tokens of a trace"
        return TraceKeys(self._links, token_ids)

    def follows_itself(self, seq_id: int) -> bool:
        keys = self.table(seq_id).keys
        assert isinstance(keys, TraceKeys), f"sequence {seq_id} is of no trace"
        return keys.has_own_tail and super().follows_itself(seq_id)
