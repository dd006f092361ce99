"""A sequence as the scheduler sees it: lengths, its place in the order, what compression did to it."""

from __future__ import annotations

from collections.abc import MutableSequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from kvreclaim.memory.prefix.keys import BlockKeys
from kvreclaim.schedule.budget.account import Account
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
    """Leading tokens that a running sequence computes and another one waits for. as_snapshot: what a pass
    leaves of them, not their blocks"""

    owner: ScheduledSequence
    num_tokens: int
    as_snapshot: bool = False


@dataclass(slots=True, eq=False)
class ScheduledSequence:
    """One output in the making. The scheduler changes num_computed, account and status, nobody else.

    token_ids:    prompt, then what was generated (or is given); whoever draws tokens appends them
    num_prompt:   leading tokens that are the prompt
    first_id:     seq_id of its request's first sequence: requests stand in the order of these
    max_len:      tokens at which it ends, prompt included
    tenant:       for whom it runs: tenants get fair shares
    seats:        places it takes among the running sequences, those of forks to come included
    max_prefix_hit: leading tokens that a prefix hit may cover at most; None: as its footprint allows. 0 where
                  all of the prompt's rows are wanted
    num_computed: leading tokens whose K/V have been written; the rest is known but not computed
    last_step:    of the scheduler in which it was computed last
    keep_s:       of a snapshot: seconds after its last hit in which it is to go behind others; 0: none
    lasting:      its blocks' bytes are all that belongs to them
    snapshot_key: names all that what a pass at its footprint's compress_prompt_at leaves depends on; None: it
                  is not to be kept, nor found
    lineage:      the key of its prompt but for the last token: it may begin with any snapshot whose key
                  begins this one, and what is left of it is kept when it ends; None: neither
    begun_with:   the key of the snapshot that it has begun with
    gang:         its request's sequences run all or none: nobody else gets the seats of its forks, and one
                  that gives way takes the others with it
    followers:    of one of these that is computed again: the others, which fork from it behind their common
                  tokens, fork_at of them
    keys:         by which the prefix index finds its blocks; the scheduler's, of token_ids, which only grow
    arrived_at:   prompt tokens that had been processed, of all sequences, when it came
    num_cached:   leading tokens that need not be computed, as the index was in its version cached_at_version
    awaits:       what a running one is computing for it; num_awaited: times that it has waited for something
    stops:        lengths at which a step must end, so that recurrent layers can keep their state there
    draft_ids:    tokens that are guessed to follow the known ones, for its next step alone
    dropped:      blocks of dropped spans that have gone since its last pass (ledger.drop_spans)
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
    account: Account = field(default_factory=Account)
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
        """Its place by importance and arrival, the least first; a request's outputs stand together."""
        return self.priority, self.first_id, self.index

    @property
    def kept_seats(self) -> int:
        """Seats of its own that nobody else may take."""
        return self.seats if self.gang else 1

    @property
    def seeks_snapshot(self) -> bool:
        """Whether it may begin with a snapshot, if one is there."""
        return (self.snapshot_key is not None or self.lineage is not None) and not self.num_computed

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed

    @property
    def is_prefill(self) -> bool:
        """Whether more than its newest token is to be computed."""
        return len(self.token_ids) - self.num_computed > 1

    @property
    def is_due(self) -> bool:
        """Whether it is compressed at its present length."""
        return self.footprint.is_due(self.num_computed, self.num_prompt, self.account)

    def is_due_after(self, num_tokens: int) -> bool:
        """Whether it is compressed once it has computed so many more tokens."""
        return self.footprint.is_due(self.num_computed + num_tokens, self.num_prompt, self.account)

    def kept_after(self, num_tokens: int) -> int:
        """Tokens that the pass leaves which it is due for then."""
        return self.footprint.kept(self.num_computed + num_tokens - self.account.num_evicted)

    @property
    def is_to_fork(self) -> bool:
        """Whether others may share its blocks before its next step: then its pass comes before they do."""
        return self.seats > 1 or self.gang or bool(self.followers)

    @property
    def reads_sparsely(self) -> bool:
        """Whether its next tokens read some blocks only."""
        return self.footprint.reads_sparsely(self.num_computed, self.num_prompt)

    @property
    def is_exact(self) -> bool:
        """Whether its next tokens are computed as everybody would who is under its salt."""
        end = self.footprint.shared_until(self.num_prompt)
        return not self.reads_sparsely and (end is None or self.num_computed < end)

    def chunk_of(self, room: int, most: int) -> int:
        """Tokens to compute next out of `room`; where these end within what is decided on together, fewer, or
        if there would be none left, as many as that takes out of `most`."""
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
        """Tokens that may be computed in one go."""
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
        """Whether it can still drop all of its spans if it begins with a snapshot of its lineage: what the
        snapshot has of them goes at drops.at, which is to come, and no pass has mixed it with others."""
        assert self.footprint.drops is not None, f"sequence {self.seq_id} drops nothing"
        known = () if snapshot.snapshot_key is None else snapshot.snapshot_key.drops
        left = beyond(self.footprint.drops.spans, known)
        is_early = snapshot.num_computed < self.footprint.drops.at
        return not left or (is_early and left[0][0] >= snapshot.account.last_computed)

    def reset(self) -> None:
        """Forget what was computed (preemption by recompute); the tokens stay known."""
        self.num_computed = 0
        self.account = Account()
        self.begun_with = None
        self.draft_ids = []
        self.dropped = ()
