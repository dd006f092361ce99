"""Snapshots: compressed prefixes for requests that begin with the same tokens. Integers only, without vLLM.

A snapshot is a list of full blocks in vLLM's prefix index, under names that are no hash of tokens. Snapshots
hold no references: after their request has ended the blocks are free, and the pool reuses them in its own
order. A snapshot that has lost a block is dropped when this is noticed. Every writer of a block, a pass as
well, removes it from the index first, so the blocks of a snapshot never change.

A request's last block is left out unless it is full. Evictions free whole blocks, so its tokens are the last
ones of the request, and a request that begins with the snapshot recomputes them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.integrations.vllm.scheduler.accounts import RequestAccount, VllmRequest
from kvreclaim.integrations.vllm.scheduler.ledger import Ledger
from kvreclaim.schedule import EvictionCounters

LEAST_SWEPT = 64
"""Snapshots that are kept without looking whether their blocks still are."""


class HashedRequest(VllmRequest, Protocol):
    """block_hashes: of its known tokens, each of so many tokens and of all before; they depend on all that
    exact blocks depend on, too (salt, adapter, pictures)."""

    block_hashes: Sequence[Hashable]


class NamingPool(Protocol):
    """hash_size: tokens that each of a request's block_hashes stands for"""

    hash_size: int

    def name_blocks(self, request_id: str, num_blocks: int) -> tuple[tuple[int, Hashable], ...]:
        """Put those of a request's first blocks that are not in the prefix index into it, each under a name
        that nothing else has. Returns: blocks and their names."""

    def are_named(self, named: Sequence[tuple[int, Hashable]]) -> bool:
        """Return whether all of these blocks still have these names in the index."""


@dataclass(frozen=True, slots=True, eq=False)
class KVSnapshot:
    """The compressed first num_tokens tokens of a request, a multiple of the block size.

    number:     no other has it
    named:      its blocks and their names in the prefix index, in the order of their tokens
    account:    of the request, when it was made; num_prompt: tokens of its prompt
    """

    number: int
    num_tokens: int
    named: tuple[tuple[int, Hashable], ...]
    account: EvictionCounters
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A request that begins in this step with a snapshot.

    num_tokens: tokens that it need not compute; shift: of them evicted
    all_prompt: whether these are tokens of its prompt; else the number of prompt tokens is the snapshot's
    """

    request_id: str
    number: int
    num_tokens: int
    shift: int
    all_prompt: bool


@dataclass(slots=True)
class SnapshotNews:
    """Message to the workers with a step. Plain values, sent by pickle.

    kept:    (snapshot, its tokens, request), made since the last step or while this one was scheduled; its
             requests end with the step
    begun:   see there
    dropped: snapshots that no further request begins with
    """

    kept: list[tuple[int, int, str]] = field(default_factory=list)
    begun: list[Begun] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.kept or self.begun or self.dropped)


class KVSnapshots:
    """All snapshots of a scheduler, by what they depend on: settings and tokens."""

    def __init__(self, ledger: Ledger, pool: NamingPool) -> None:
        self.ledger, self.pool = ledger, pool
        self._held: dict[CompressionConfig, dict[Hashable, KVSnapshot]] = {}
        self._numbers = count()
        self._news = SnapshotNews()
        self._sweep_at = LEAST_SWEPT

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def keep(self, request: HashedRequest) -> None:
        """Make a snapshot of a request that is about to lose its blocks, if it was compressed."""
        record = self.ledger.records.get(request.request_id)
        if record is None or record.settings is None or self.ledger.has_unsent(request.request_id):
            return
        size = self.ledger.block_size
        num_tokens = min(request.num_computed_tokens, request.num_tokens) // size * size
        if not _is_whole(record, num_tokens):
            return
        num_blocks = (num_tokens - record.account.num_evicted) // size
        named = self.pool.name_blocks(request.request_id, num_blocks)
        account = replace(record.account)
        made = KVSnapshot(next(self._numbers), num_tokens, named, account, request.num_prompt_tokens)
        held = self._held.setdefault(record.settings, {})
        digest = request.block_hashes[num_tokens // self.pool.hash_size - 1]
        if (before := held.get(digest)) is not None:
            self._news.dropped.append(before.number)
        held[digest] = made
        self._news.kept.append((made.number, num_tokens, request.request_id))
        self._sweep()

    def find(self, request: HashedRequest, more_than: int) -> KVSnapshot | None:
        """Return the longest snapshot that a waiting request can begin with, of more than num_tokens tokens.
        At least its last token is left to compute."""
        settings = self.ledger.settings_of(request)
        held = None if settings is None or request.resumable else self._held.get(settings)
        if not held:
            return None
        for num_tokens, digest in self._prefixes(request, more_than):
            found = held.get(digest)
            if found is None:
                continue
            if not self.pool.are_named(found.named):
                self._news.dropped.append(held.pop(digest).number)
            elif num_tokens <= request.num_prompt_tokens or found.num_prompt == request.num_prompt_tokens:
                return found
        return None

    def begin(self, request: HashedRequest, found: KVSnapshot) -> None:
        """Note that the request has the snapshot's blocks, and computes the following tokens in this step."""
        account, all_prompt = replace(found.account), found.num_tokens <= request.num_prompt_tokens
        if all_prompt:
            uneven = self.ledger.records[request.request_id].footprint.eviction_method.uneven
            live = found.num_tokens - account.num_evicted
            account = EvictionCounters(account.num_evicted, 0 if uneven else live, found.num_tokens)
        self.ledger.begin(request, account, found.num_tokens, all_prompt)
        shift = account.num_evicted
        self._news.begun.append(Begun(request.request_id, found.number, found.num_tokens, shift, all_prompt))

    def take_news(self) -> SnapshotNews | None:
        """Return the message to the workers for the scheduled step; None: nothing."""
        news, self._news = self._news, SnapshotNews()
        return news or None

    def _prefixes(self, request: HashedRequest, more_than: int) -> Iterator[tuple[int, Hashable]]:
        """Yield lengths that a snapshot may have, the longest first, with the hash of the tokens."""
        size, each = self.ledger.block_size, self.pool.hash_size
        longest = min(request.num_tokens - 1, len(request.block_hashes) * each) // size * size
        for num_tokens in range(longest, more_than, -size):
            yield num_tokens, request.block_hashes[num_tokens // each - 1]

    def _sweep(self) -> None:
        """Drop those that have lost a block, each time that their number has doubled."""
        if len(self) < self._sweep_at:
            return
        for held in self._held.values():
            for digest, one in list(held.items()):
                if not self.pool.are_named(one.named):
                    self._news.dropped.append(held.pop(digest).number)
        self._sweep_at = max(LEAST_SWEPT, 2 * len(self))


def _is_whole(record: RequestAccount, num_tokens: int) -> bool:
    """Return whether the full blocks of a request hold its compressed first num_tokens tokens, and leave room
    for a step without a pass before it."""
    account = record.account
    live = num_tokens - account.num_evicted
    assert record.settings is not None, "a request without compression has no snapshot"
    in_tail = account.last_computed - num_tokens  # of its last pass, behind the full blocks: in every head
    return (
        account.num_evicted > 0
        and 0 < live < record.footprint.decode_cap
        and in_tail <= record.settings.recent
    )
