"""Companions come as far as their owners are, and are compressed on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from kvreclaim.compression.policy import Signal
from kvreclaim.compression.signal_needs import needs_of
from kvreclaim.engine.compact.job import CompactionJob
from kvreclaim.engine.compact.passes import CompressionPass
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.request import Request, Scheduled, Sequence, Verify
from kvreclaim.engine.speculative.asked import QUERIES, CompanionQueries
from kvreclaim.engine.speculative.feeding import CompanionCopier, CopyRange
from kvreclaim.schedule import Row, Status
from kvreclaim.schedule.budget.ledger import take_choice
from kvreclaim.schedule.companions import Companions

logger = logging.getLogger(__name__)

Pair = tuple[Sequence, Sequence]
"""An owner and its companion."""


class CompanionTracker:
    """How companions begin and keep up.

    In the pool of its owner a companion begins where the prompt ends, as a fork of it: it shares all blocks,
    costs nothing, and its first pass chooses from the whole full cache. One whose policy adds attention up
    follows from the first token on, and so does every one where full caches lie in host memory: it is given
    the owner's tokens piece by piece and is compressed in between, as a request that is compressed would be.
    What it is given is exact: keys and values as the full cache has them, over those that it wrote itself
    while it drafted.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        runner: ModelRunner,
        compression: CompressionPass,
        companions: Companions[Sequence],
        feeding: CompanionCopier,
    ) -> None:
        self.lifecycle, self.runner, self.compression = lifecycle, runner, compression
        self.companions, self.feeding = companions, feeding
        self.asked = CompanionQueries(runner.signals)
        self._forks = companions.memory is lifecycle.memory
        self._unborn: dict[int, Sequence] = {}

    def follow(self, computed: Iterable[Sequence]) -> None:
        """These have advanced."""
        self.forget_gone()
        running = [seq for seq in computed if is_owner(seq) and seq.status is Status.RUNNING]
        owners = [seq for seq in running if not verify_of(seq).eviction_method.sparse_reads]
        try:
            pairs = [(owner, companion) for owner in owners if (companion := self._companion(owner))]
            self._compress([(owner, companion) for owner, companion in pairs if companion.is_due])
            while pairs:
                pairs = self._advance(pairs)
        except Exception as error:
            self.failed("following %d sequences", len(owners), error)
            for owner in owners:
                self.leave(owner.seq_id)
        self.asked.clear()

    def _companion(self, owner: Sequence) -> Sequence | None:
        """The owner's; a new one if it is time for one and there is room."""
        verify, companion = verify_of(owner), self.companions.get(owner)
        if companion is not None and verify.is_short and self._can_begin(owner):
            self.leave(owner.seq_id)
            companion = None
        verify.is_short = False
        if companion is None:
            self._note_prompt(owner)
            return self._begin(owner) if self._can_begin(owner) else None
        adjust(companion, owner)
        companion.token_ids[companion.num_computed :] = owner.token_ids[companion.num_computed :]
        return companion

    def _can_begin(self, owner: Sequence) -> bool:
        """Whether a companion that begins now has what its policy asks for."""
        needs = needs_of(verify_of(owner).compressor)
        from_first = self.asked.begins(owner)
        if Signal.ATTENTION_MASS in needs:
            return from_first or self._forks
        if not self._forks:
            return from_first or not needs & QUERIES
        return owner.num_computed >= owner.num_prompt

    def _note_prompt(self, owner: Sequence) -> None:
        """Keep the queries of a prompt that is not through for the companion that is to be forked then."""
        needs = needs_of(verify_of(owner).compressor)
        adds_up = Signal.ATTENTION_MASS in needs
        if self._forks and not adds_up and needs & QUERIES and owner.num_computed < owner.num_prompt:
            unborn = self._unborn.setdefault(owner.seq_id, self.new(owner))
            self._tell(owner, unborn, self.asked.first(owner))

    def _begin(self, owner: Sequence) -> Sequence | None:
        verify = verify_of(owner)
        if not self.companions.has_room(owner, verify.footprint, verify.num_tokens):
            return None
        companion = self._unborn.pop(owner.seq_id, None) or self.new(owner)
        companion.token_ids[:] = owner.token_ids
        adds_up = Signal.ATTENTION_MASS in needs_of(verify.compressor)
        if not self._forks or (adds_up and self.asked.begins(owner)):
            self.companions.begin(owner, companion)
            return companion
        self.companions.fork(owner, companion, owner)
        if needs_of(verify.compressor) & QUERIES:
            self._tell(owner, companion, self.asked.first(owner))
        return companion

    def new(self, owner: Sequence) -> Sequence:
        """A companion that holds nothing and is known to nobody."""
        return Sequence(
            seq_id=self.lifecycle.new_id(),
            request_id=owner.request_id,
            token_ids=list(owner.token_ids),
            num_prompt=owner.num_prompt,
            max_len=owner.max_len,
            footprint=verify_of(owner).footprint,
            request=shadow_of(owner.request, verify_of(owner)),
        )

    def _advance(self, pairs: list[Pair]) -> list[Pair]:
        """Give each companion its next tokens up to its next pass. Returns: those that are still behind."""
        pieces = []
        for owner, companion in pairs:
            gap = owner.num_computed - companion.num_computed
            until = companion.footprint.tokens_until_pass(
                companion.num_computed, companion.num_prompt, companion.account
            )
            if gap <= 0 or companion.status is not Status.RUNNING:
                continue
            piece = CopyRange(owner, companion, companion.num_computed, min(gap, until))
            if self.has_room(companion, piece.num_tokens):
                pieces.append(piece)
            else:
                self.leave(owner.seq_id)
        if not pieces:
            return []
        self.runner.ready()
        self.feeding.copy(pieces)
        for piece in pieces:
            self.companions.commit(piece.companion, piece.num_tokens)
            self._tell(piece.owner, piece.companion, piece.first)
        left = [(piece.owner, piece.companion) for piece in pieces]
        self._compress([(owner, companion) for owner, companion in left if companion.is_due])
        return left

    def _tell(self, owner: Sequence, companion: Sequence, first: int) -> None:
        """What its policy asks to know of the tokens from `first` on, up to where the companion is; of one
        that holds nothing yet all that the owner has computed."""
        slots = None
        if companion.status is Status.RUNNING:
            row = Row(companion.seq_id, first, companion.num_computed - first)
            slots = self.runner.slots(Scheduled(companion, row))
        self.asked.tell(owner, companion, first, slots)

    def has_room(self, companion: Sequence, num_tokens: int) -> bool:
        """Room for so many more tokens, ready to be written."""
        growth = self.companions.grow(companion, num_tokens)
        if growth is None:
            return False
        self.runner.make_ready(growth)
        self.companions.memory.release_copy_sources()
        return True

    def _compress(self, due: list[Pair]) -> None:
        """The passes of companions; one that lacks blocks for its pass is given up."""
        jobs, owners = [], []
        for owner, companion in due:
            plan, compressor = self.companions.compress(companion), companion.request.compressor
            assert compressor is not None, f"companion {companion.seq_id} has no compression"
            if plan is None:
                self.leave(owner.seq_id)
            else:
                jobs.append(CompactionJob(companion, compressor, plan))
                owners.append(owner)
        outcomes = self.compression.run(jobs) if jobs else []
        for job, owner, outcome in zip(jobs, owners, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.failed("compressing for drafts of request %s", owner.request_id, outcome)
                self.leave(owner.seq_id)
            elif job.plan.eviction_method.settles_after_choice:
                account, memory = job.seq.account, self.companions.memory
                take_choice(job.plan, outcome.gone, outcome.prompt_slots, account, memory)

    def leave(self, owner_id: int) -> None:
        """An owner has no companion any more, now or later."""
        for companion in (self.companions.leave(owner_id), self._unborn.pop(owner_id, None)):
            if companion is not None:
                self.runner.signals.drop(companion.seq_id)

    def forget_gone(self) -> None:
        """What is kept beside companions that have given way is forgotten."""
        for companion in self.companions.gone:
            self.runner.signals.drop(companion.seq_id)
        self.companions.gone.clear()

    def failed(self, what: str, whose: object, error: Exception) -> None:
        """Nothing is lost but drafts: the log says it, and it is counted."""
        self.lifecycle.totals.speculation.num_failed += 1
        logger.error(what + " failed; they go on without drafts", whose, exc_info=error)


def shadow_of(request: Request, verify: Verify) -> Request:
    """A request as a companion's: it is compressed, and reports nothing."""
    return replace(
        request,
        spec=replace(request.spec, params=replace(request.params, logprobs=None, prompt_logprobs=None)),
        compressor=verify.compressor,
        verify=None,
        sequences=[],
        prompt_logprobs=None,
        metrics=RequestMetrics(),
    )


def adjust(companion: Sequence, owner: Sequence) -> None:
    """A budget that chooses itself may be another one by now."""
    verify = verify_of(owner)
    if companion.request.compressor is not verify.compressor:
        companion.footprint, companion.request = verify.footprint, shadow_of(owner.request, verify)


def is_owner(seq: Sequence) -> bool:
    """Whether a compressed cache drafts for it."""
    return seq.request.verify is not None and seq.finish_reason is None


def verify_of(owner: Sequence) -> Verify:
    """Of an owner's request."""
    verify = owner.request.verify
    assert verify is not None, f"sequence {owner.seq_id} is not verified"
    return verify
