"""A sequence as the scheduler sees it: lengths, order, compression counters."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from kvreclaim.memory.prefix.index import BlockKeys
from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.budget.drops import beyond
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.snapshot_key import SnapshotKey


class Status(Enum):
    """State of a sequence."""

    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, eq=False)
class Awaited:
    """Leading tokens that a running sequence computes and another one waits for. as_snapshot: as a snapshot
    after a pass, not as blocks"""

    owner: ScheduledSequence
    num_tokens: int
    as_snapshot: bool = False


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One unfinished output. Only the scheduler changes num_computed, account and status.

    token_ids:    prompt, then generated (or given) tokens; appended by the sampler's caller
    num_prompt:   leading tokens that are the prompt
    first_id:     seq_id of its request's first sequence, by which requests are ordered
    max_len:      tokens at which it ends, prompt included
    tenant:       tenants get fair shares
    seats:        places among the running sequences, including those of future forks
    max_prefix_hit: most leading tokens of a prefix hit; None: as its footprint allows. 0 where all rows of
                  the prompt are needed
    num_computed: leading tokens with K/V; the rest is known but not computed
    last_step:    last scheduler step that computed it
    keep_s:       of a snapshot: seconds after its last hit until it may be evicted early; 0: at once
    lasting:      its blocks' bytes are its complete state
    snapshot_key: identifies everything on which the result of a pass at compress_prompt_at depends; None: the
                  result is neither kept nor looked up
    lineage:      key of its prompt without the last token: it may start with any snapshot under a prefix of
                  this key, and its own is kept when it ends; None: neither
    begun_with:   key of the snapshot with which it started
    gang:         its request's sequences run all or none: the seats of its forks are reserved, and they are
                  preempted together
    followers:    the other sequences of a recomputed gang, which fork from it after their common
                  tokens, fork_at of them
    keys:         of its blocks in the prefix index; the scheduler's, from token_ids, which only grow
    arrived_at:   prompt tokens processed, of all sequences, at its arrival
    num_cached:   leading tokens that need not be computed, by the index in its version cached_at_version
    awaits:       prefix that a running sequence computes for it; num_awaited: number of such waits
    stops:        lengths at which a step must end, so that recurrent layers can keep their state
    draft_ids:    draft tokens for its next step
    dropped:      blocks of dropped spans freed since its last pass (ledger.drop_spans)
    """

    seq_id: int
    request_id: str
    token_ids: MutableSequence[int]
    num_prompt: int
    max_len: int
    index: int = 0
    first_id: int = 0
    footprint: Footprint = field(default_factory=Footprint)
    priority: int = 0
    tenant: str | None = None
    cache_salt: str | None = None
    keep_s: float = 0.0
    seats: int = 1
    max_prefix_hit: int | None = None
    num_computed: int = 0
    account: EvictionCounters = field(default_factory=EvictionCounters)
    status: Status = Status.WAITING
    last_step: int = 0
    lasting: bool = True
    snapshot_key: SnapshotKey | None = None
    lineage: SnapshotKey | None = None
    begun_with: SnapshotKey | None = None
    gang: bool = False
    followers: list[Self] = field(default_factory=list)
    fork_at: int = 0
    keys: BlockKeys | None = None
    arrived_at: int = 0
    num_cached: int = 0
    cached_at_version: int = -1
    awaits: Awaited | None = None
    num_awaited: int = 0
    stops: tuple[int, ...] = ()
    draft_ids: list[int] = field(default_factory=list)
    dropped: tuple[int, ...] = ()

    @property
    def rank(self) -> tuple[int, int, int]:
        """Sort key by importance and arrival, ascending; a request's outputs are adjacent."""
        return self.priority, self.first_id, self.index

    @property
    def kept_seats(self) -> int:
        """Seats reserved for its forks."""
        return self.seats if self.gang else 1

    @property
    def seeks_snapshot(self) -> bool:
        """Whether it may start with a snapshot."""
        return (self.snapshot_key is not None or self.lineage is not None) and not self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefill(self) -> bool:
        """Whether more than its newest token is uncomputed."""
        return len(self.token_ids) - self.num_computed > 1

    @property
    def is_due(self) -> bool:
        """Whether it is compressed at its present length."""
        return self.footprint.is_due(self.num_computed, self.num_prompt, self.account)

    def is_due_after(self, num_tokens: int) -> bool:
        """Whether it is compressed after that many more tokens."""
        return self.footprint.is_due(self.num_computed + num_tokens, self.num_prompt, self.account)

    def kept_after(self, num_tokens: int) -> int:
        """Tokens kept by the pass that is due then."""
        return self.footprint.kept(self.num_computed + num_tokens - self.account.num_evicted)

    @property
    def is_to_fork(self) -> bool:
        """Whether others may share its blocks before its next step, so that its pass comes first."""
        return self.seats > 1 or self.gang or bool(self.followers)

    @property
    def reads_sparsely(self) -> bool:
        """Whether its next tokens read only some blocks."""
        return self.footprint.reads_sparsely(self.num_computed, self.num_prompt)

    @property
    def is_exact(self) -> bool:
        """Whether its next tokens are computed as in any request with its salt."""
        end = self.footprint.shared_until(self.num_prompt)
        return not self.reads_sparsely and (end is None or self.num_computed < end)

    def chunk_of(self, room: int, most: int) -> int:
        """Number of tokens to compute next out of `room`; rounded down to the span of sparse rows or, if
        nothing would remain, up within `most`."""
        sparse, chunk = self.footprint.sparse, self.next_chunk
        num_tokens = min(chunk, room)
        if sparse is None or (
            num_tokens == chunk and self.footprint.eviction_method.evicts
        ):  # up to the next pass
            return num_tokens
        stop = self.footprint.sparse_rows(self.num_prompt).stop
        found = sparse.aligned(self.num_computed, num_tokens, stop)
        if not found and room:
            whole = min(chunk, sparse.span - self.num_computed % sparse.span)
            found = whole if whole <= most else 0
        return found

    @property
    def next_chunk(self) -> int:
        """Most tokens that may be computed at once."""
        limit = self.footprint.tokens_until_pass(self.num_computed, self.num_prompt, self.account)
        if self.followers:
            limit = min(limit, self.fork_at - self.num_computed)
        for stop in self.stops:
            if stop > self.num_computed:
                limit = min(limit, stop - self.num_computed)
        return min(self.num_uncomputed + len(self.draft_ids), limit)

    @property
    def hit_limit(self) -> int:
        """Leading tokens that a prefix hit may cover."""
        limit = self.footprint.hit_limit(self.num_prompt, len(self.token_ids))
        if self.followers:
            limit = min(limit, self.fork_at - 1)
        return limit if self.max_prefix_hit is None else min(limit, self.max_prefix_hit)

    def can_drop_behind(self, snapshot: Self) -> bool:
        """Whether it can still drop all its spans if it starts with this snapshot of its lineage: the
        snapshot's own are dropped at drops.at, which is to come, and no pass has mixed them with others."""
        assert self.footprint.drops is not None, f"sequence {self.seq_id} drops nothing"
        known = () if snapshot.snapshot_key is None else snapshot.snapshot_key.drops
        left = beyond(self.footprint.drops.spans, known)
        is_early = snapshot.num_computed < self.footprint.drops.at
        return not left or (is_early and left[0][0] >= snapshot.account.last_computed)

    def reset(self) -> None:
        """Discard computed tokens (preemption by recompute); the tokens stay known."""
        self.num_computed = 0
        self.account = EvictionCounters()
        self.begun_with = None
        self.draft_ids = []
        self.dropped = ()
