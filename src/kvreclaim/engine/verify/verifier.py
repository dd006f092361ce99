"""Companions from begin to end: they follow what their owners compute, and draft what comes next.

Source: VeriCache (arXiv 2605.17613), self-speculation over a compressed cache; docs/lossless.md.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from dataclasses import replace

from kvreclaim.engine.core.lifecycle import Lifecycle
from kvreclaim.engine.core.outputs import RequestMetrics
from kvreclaim.engine.core.request import Request, Scheduled, Sequence, Verify
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.speculate.drafter import most_drafts
from kvreclaim.engine.verify.asked import Asked
from kvreclaim.engine.verify.drafting import Draft, draft_all
from kvreclaim.engine.verify.feeding import Feeding, Piece
from kvreclaim.engine.ways.job import Job
from kvreclaim.engine.ways.passes import CompressionPass
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.schedule import Row, Status, Way
from kvreclaim.schedule.companions import Companions
from kvreclaim.schedule.ledger import take_choice

logger = logging.getLogger(__name__)

Watch = Callable[[AttentionCall], None]


class Verifier:
    """Owners are sequences of requests with `verify`: they keep all tokens and compute as if nothing were
    compressed. Each has a companion, a sequence that the scheduler does not know: what the policy keeps of
    the owner's tokens, compressed at the points at which the policy alone would compress.

    A round: the companions of all owners draft together (`propose`); the scheduler has each owner compute
    its last token and the drafts in one step; what it draws behind them is its answer, as far as the drafts
    agree; then the companion is given the exact keys and values of these tokens, over what it wrote while it
    drafted (`follow`), and is compressed if it is due.

    Where a companion lacks blocks, or anything about it fails, its owner goes on without one.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        runner: ModelRunner,
        compression: CompressionPass,
        companions: Companions[Sequence],
        feeding: Feeding,
    ) -> None:
        self.lifecycle, self.runner, self.compression = lifecycle, runner, compression
        self.companions, self.feeding = companions, feeding
        self.asked = Asked(runner.signals)
        self._eos_token_ids = lifecycle.loaded.eos_token_ids
        self._readers: dict[int, Sequence] = {}

    # What owners compute.

    def watch(self, step: list[Scheduled], batch: AttentionBatch | None) -> list[Watch]:
        """What is to see the attention calls of a step of owners and others."""
        if not any(item.seq.request.verify is not None for item in step):
            return []
        return self.asked.watch(step, batch)

    def follow(self, computed: Iterable[Sequence]) -> None:
        """These have advanced; companions come as far as their owners are."""
        self._settle()
        behind = [seq for seq in computed if _is_owner(seq) and seq.status is Status.RUNNING]
        owners = [seq for seq in behind if seq.request.verify.way is not Way.READS]  # type: ignore[union-attr]
        try:
            going = [(owner, companion) for owner in owners if (companion := self._companion(owner))]
            while going:
                going = self._advance(going)
        except Exception:
            self._failed("following %d sequences", len(owners))
            for owner in owners:
                self.leave(owner.seq_id)
        self.asked.clear()

    def _companion(self, owner: Sequence) -> Sequence | None:
        """The owner's, a new one if there is room."""
        companion, verify = self.companions.get(owner), owner.request.verify
        assert verify is not None, f"sequence {owner.seq_id} is not verified"
        if companion is not None and verify.is_short:
            self.leave(owner.seq_id)
            companion = None
        if companion is not None:
            _adjust(companion, owner.request, verify)
        verify.is_short = False
        if companion is None:
            if not self.companions.has_room(owner, verify.footprint, verify.num_tokens):
                return None
            companion = self._new(owner)
            self.companions.begin(owner, companion)
        companion.token_ids[companion.num_computed :] = owner.token_ids[companion.num_computed :]
        return companion

    def _new(self, owner: Sequence) -> Sequence:
        verify = owner.request.verify
        assert verify is not None, f"sequence {owner.seq_id} is not verified"
        request = shadow_of(owner.request, verify)
        companion = Sequence(
            seq_id=self.lifecycle.new_id(),
            request_id=owner.request_id,
            token_ids=list(owner.token_ids),
            num_prompt=owner.num_prompt,
            max_len=owner.max_len,
            footprint=verify.footprint,
            request=request,
        )
        verify.accounts.append(companion.account)
        return companion

    def _advance(self, going: list[tuple[Sequence, Sequence]]) -> list[tuple[Sequence, Sequence]]:
        """Give each companion its next tokens up to its next pass. Returns: those that are still behind."""
        pieces = []
        for owner, companion in going:
            gap = owner.num_computed - companion.num_computed
            until = companion.footprint.tokens_until_pass(
                companion.num_computed, companion.num_prompt, companion.account
            )
            if gap > 0:
                piece = Piece(owner, companion, companion.num_computed, min(gap, until))
                if self._has_room(companion, piece.num_tokens):
                    pieces.append(piece)
                else:
                    self.leave(owner.seq_id)
        if not pieces:
            return []
        self.runner.ready()
        self.feeding.copy(pieces)
        for piece in pieces:
            self.companions.commit(piece.companion, piece.num_tokens)
            row = Row(piece.companion.seq_id, piece.first, piece.num_tokens)
            slots = self.runner.slots(Scheduled(piece.companion, row))
            self.asked.tell(piece.owner, piece.companion, piece.first, slots)
        self._compress([piece for piece in pieces if piece.companion.is_due])
        return [(p.owner, p.companion) for p in pieces if p.companion.status is Status.RUNNING]

    def _has_room(self, companion: Sequence, num_tokens: int) -> bool:
        """Room for so many more tokens, ready to be written."""
        growth = self.companions.grow(companion, num_tokens)
        if growth is None:
            return False
        self.runner.make_ready(growth)
        self.companions.memory.settle()
        return True

    def _compress(self, due: list[Piece]) -> None:
        """The passes of companions; one that lacks blocks for its pass is given up."""
        jobs, owners = [], []
        for piece in due:
            plan = self.companions.compress(piece.companion)
            if plan is None:
                self.leave(piece.owner.seq_id)
                continue
            compressor = piece.companion.request.compressor
            assert compressor is not None, f"companion {piece.companion.seq_id} has no compression"
            jobs.append(Job(piece.companion, compressor, plan))
            owners.append(piece.owner)
        for job, owner, outcome in zip(jobs, owners, self.compression.run(jobs) if jobs else (), strict=True):
            if isinstance(outcome, Exception):
                logger.error(
                    "compressing for drafts of request %s failed", owner.request_id, exc_info=outcome
                )
                self.leave(owner.seq_id)
            elif job.plan.way in (Way.MASK, Way.BLOCKS):
                account, memory = job.seq.account, self.companions.memory
                take_choice(job.plan, outcome.gone, outcome.prompt_slots, account, memory)

    def _failed(self, what: str, whose: object, error: Exception | None = None) -> None:
        """Nothing is lost but drafts: the log says it, and it is counted."""
        self.lifecycle.totals.speculation.num_failed += 1
        logger.error(what + " failed; they go on without drafts", whose, exc_info=error or True)

    # Drafts.

    def propose(self, running: ListLike[Sequence]) -> None:
        """Draft for every owner whose companion has come as far as itself."""
        self._settle()
        drafts: list[Draft] = []
        try:
            for owner in filter(_is_owner, running):
                drafts += self._begin(owner)
            draft_all(drafts, self.runner, self._eos_token_ids)
            for draft in drafts:
                draft.owner.draft_ids = draft.tokens
        except Exception:
            self._failed("drafting for %d sequences", len(drafts))
            for draft in drafts:
                self.leave(draft.owner.seq_id)
        for draft in drafts:
            self._end(draft)

    def _begin(self, owner: Sequence) -> list[Draft]:
        """A draft with room for its tokens, or none."""
        verify = owner.request.verify
        assert verify is not None, f"sequence {owner.seq_id} is not verified"
        memory, form = self.lifecycle.memory, self.runner.cache.format
        most = most_drafts(owner, verify.num_tokens, memory, form)
        companion = self._reader(owner, most) if verify.way is Way.READS else self.companions.get(owner)
        if not most or companion is None or companion.num_computed != owner.num_computed:
            return []
        companion.token_ids[companion.num_computed :] = owner.token_ids[companion.num_computed :]
        most = most_drafts(companion, most, self.companions.memory, form)
        while most and not self._has_room(companion, most):
            most //= 2
        draft = Draft(owner, companion, most, verify.belief)
        if not most:
            self._end(draft)
        return [draft] if most else []

    def _reader(self, owner: Sequence, most: int) -> Sequence | None:
        """A companion that reads some of the owner's own blocks: a fork of it, as long as it drafts."""
        if not most:
            return None
        reader = self._readers.get(owner.seq_id)
        if reader is None:
            reader = self._readers[owner.seq_id] = self._new(owner)
        reader.token_ids[:], reader.row_cache = owner.token_ids, None
        _adjust(reader, owner.request, owner.request.verify)
        self.companions.fork(owner, reader, owner)
        return reader

    def _end(self, draft: Draft) -> None:
        """What a companion wrote while it drafted is overwritten when it follows."""
        companion = draft.companion
        del companion.token_ids[companion.num_computed + 1 :]
        self.runner.signals.digests.cut(
            companion.seq_id, companion.num_computed // self.companions.memory.block_size
        )
        if draft.owner.seq_id in self._readers:
            self.companions.leave(draft.owner.seq_id)

    # Owners' lives.

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """An owner has been forked; its companion is, too."""
        companion = self.companions.get(parent)
        if companion is None or not _is_owner(child):
            return
        branch = self._new(child)
        branch.state = companion.state.fork()
        self.companions.fork(child, branch, companion)
        self.runner.signals.fork(companion.seq_id, branch.seq_id)

    def leave(self, owner_id: int) -> None:
        """An owner has lost its blocks, or ended, or its companion is of no use."""
        if (companion := self.companions.leave(owner_id)) is not None:
            self.runner.signals.drop(companion.seq_id)
        if (reader := self._readers.pop(owner_id, None)) is not None:
            self.runner.signals.drop(reader.seq_id)

    def _settle(self) -> None:
        for companion in self.companions.gone:
            self.runner.signals.drop(companion.seq_id)
        self.companions.gone.clear()


def shadow_of(request: Request, verify: Verify) -> Request:
    """A request as a companion's: it is compressed, and reports nothing."""
    return replace(
        request,
        params=replace(request.params, logprobs=None, prompt_logprobs=None),
        compressor=verify.compressor,
        verify=None,
        sequences=[],
        prompt_logprobs=None,
        metrics=RequestMetrics(),
    )


def _adjust(companion: Sequence, request: Request, verify: Verify | None) -> None:
    """A budget that chooses itself may be another one by now."""
    assert verify is not None, f"request {request.request_id} is not verified"
    if companion.request.compressor is not verify.compressor:
        companion.footprint, companion.request = verify.footprint, shadow_of(request, verify)


def _is_owner(seq: Sequence) -> bool:
    return seq.request.verify is not None and seq.finish_reason is None
