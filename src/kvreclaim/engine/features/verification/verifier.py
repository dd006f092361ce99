"""Verify mode: companions follow their targets over compressed caches and draft their next tokens.

Source: VeriCache (arXiv 2605.17613), self-speculation over a compressed cache; docs/lossless.md.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from kvreclaim.compression.compressor import needs_of
from kvreclaim.compression.policy import Signal
from kvreclaim.engine.execute.recurrent import RecurrentStates
from kvreclaim.engine.extension import AttentionHook, Extension
from kvreclaim.engine.features.verification.companion_drafts import CompanionDraft, draft_all
from kvreclaim.engine.features.verification.companion_tracker import (
    CompanionTracker,
    adjust,
    is_target,
    verify_of,
)
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.request.request import Scheduled, Sequence
from kvreclaim.engine.request.verify import Verify
from kvreclaim.engine.speculative.drafter import most_drafts
from kvreclaim.ops.batch import AttentionBatch
from kvreclaim.speculation import MOST_DRAFTS


class Verifier(Extension):
    """Drafts for targets, the sequences of requests with `verify`, which keep all tokens. Each target has a
    companion, a sequence outside of the scheduler, with the tokens of the target that the policy keeps. A
    companion is compressed at the same lengths as a compressed request.

    A round: the companions of all targets draft together (`propose`). Each target computes its last token
    and the drafts in one step. The tokens that it draws are its answer, up to the first draft that differs.
    The companion then receives the exact keys and values of these tokens, which overwrite those of its
    drafts (`computed`), and is compressed if it is due.

    A target goes on without a companion if that lacks blocks or fails.

    states: of recurrent layers. A companion reads the target's state and drafts into slots that are lent to
            it. Each verified draft needs one slot
    """

    rank = 50

    def __init__(
        self, lifecycle: Lifecycle, tracker: CompanionTracker, states: RecurrentStates | None = None
    ) -> None:
        self.lifecycle, self.tracker, self.states = lifecycle, tracker, states
        self.companions, self.runner = tracker.companions, tracker.runner
        self._eos_token_ids = lifecycle.loaded.eos_token_ids
        self._readers: dict[int, Sequence] = {}
        self._drafts: dict[int, CompanionDraft] = {}

    def max_prefix_hit(self, verify: Verify) -> int | None:
        """Return the number of leading tokens that a prefix hit may cover; None: any number.

        The queries of hit tokens are not computed. Attention cannot be summed without them, and a companion
        that follows from the first token on would have no queries at its passes. A forked companion has only
        the queries after the hit, fewer than its policy uses.
        """
        needs = needs_of(verify.compressor)
        forks = self.companions.memory is self.lifecycle.memory
        is_blind = Signal.ATTENTION_MASS in needs or (Signal.RECENT_QUERIES in needs and not forks)
        return 0 if is_blind else None

    def attend(self, runs: list[Scheduled], batch: AttentionBatch | None) -> list[AttentionHook]:
        """Keep the queries of targets for the policies of their companions."""
        if not any(item.seq.request.verify is not None for item in runs):
            return []
        return self.tracker.queries.watch(runs, batch)

    def computed(self, sequences: list[Sequence]) -> None:
        """Bring the companions of these sequences, which have advanced, up to date."""
        targets = [seq for seq in sequences if is_target(seq)]
        for target in targets:
            draft = self._drafts.pop(target.seq_id, None)
            if draft is not None and target.num_computed > draft.first:
                verify_of(target).note(draft.probabilities, target.num_computed - draft.first - 1)
        self.tracker.follow(targets)

    def begin_step(self) -> None:
        """Cut drafts for which requests added since then leave no slots."""
        if self.states is None:
            return
        running = self.lifecycle.scheduler.running
        targets = [seq for seq in running if is_target(seq)]
        most = self._share(targets, running)
        for target in targets:
            del target.draft_ids[most:]

    def _share(self, targets: ListLike[Sequence], running: ListLike[Sequence]) -> int:
        """Return the drafts per target for which recurrent layers have slots."""
        if self.states is None or not targets:
            return MOST_DRAFTS
        scheduler = self.lifecycle.scheduler
        begin = min(len(scheduler.waiting), scheduler.max_num_seqs - len(running))
        return self.states.group.spare(len(targets), len(running), begin) // len(targets)

    def propose(self, running: ListLike[Sequence]) -> None:
        """Draft for every target with a companion that is up to date."""
        self.tracker.forget_gone()
        drafts: list[CompanionDraft] = []
        try:
            targets = [seq for seq in running if is_target(seq)]
            share = self._share(targets, running)
            for target in targets:
                drafts += self._begin(target, share)
            draft_all(drafts, self.runner, self._eos_token_ids, self.states)
            for draft in drafts:
                draft.target.draft_ids = draft.tokens
                self._drafts[draft.target.seq_id] = draft
        except Exception as error:
            self.tracker.failed("drafting for %d sequences", len(drafts), error)
            for target in filter(is_target, running):
                self.leave(target.seq_id)
        for draft in drafts:
            self._end(draft)

    def _begin(self, target: Sequence, share: int) -> list[CompanionDraft]:
        """Return a draft with room for its tokens, at most `share`, or an empty list."""
        verify = verify_of(target)
        most = most_drafts(target, min(verify.num_tokens, share))
        companion = (
            self._reader(target, most) if verify.eviction_method.sparse_reads else self.companions.get(target)
        )
        if not most or companion is None or companion.num_computed != target.num_computed:
            return []
        companion.token_ids[companion.num_computed :] = target.token_ids[companion.num_computed :]
        most = most_drafts(companion, most)
        while most and not self.tracker.has_room(companion, most):
            most //= 2
        draft = CompanionDraft(target, companion, most, companion.num_computed)
        if not most:
            self._end(draft)
        elif self.states is not None:
            self.states.group.lend(target.seq_id, min(most, 2))
        return [draft] if most else []

    def _reader(self, target: Sequence, most: int) -> Sequence | None:
        """Return a companion that reads some of the target's blocks: a fork that lasts while it drafts."""
        if not most:
            return None
        reader = self._readers.get(target.seq_id)
        if reader is None:
            reader = self._readers[target.seq_id] = self.tracker.new(target)
        reader.token_ids[:], reader.row_cache = target.token_ids, None
        adjust(reader, target)
        self.companions.fork(target, reader, target)
        return reader

    def _end(self, draft: CompanionDraft) -> None:
        """End a draft. Its keys and values are overwritten when the companion follows."""
        companion = draft.companion
        if self.states is not None:
            self.states.group.lend(draft.target.seq_id, 0)
        del companion.token_ids[companion.num_computed + 1 :]
        self.runner.signals.digests.cut(
            companion.seq_id, companion.num_computed // self.companions.memory.block_size
        )
        if draft.target.seq_id in self._readers:
            self.companions.leave(draft.target.seq_id)

    # Lifecycle of targets.

    def forked(self, parent: Sequence, child: Sequence) -> None:
        """Fork the companion of a target that has been forked."""
        companion = self.companions.get(parent)
        if companion is None or not is_target(child):
            return
        branch = self.tracker.new(child)
        branch.state = companion.state.fork()
        self.companions.fork(child, branch, companion)
        self.runner.signals.fork(companion.seq_id, branch.seq_id)

    def preempted(self, seq: Sequence, *, parked: bool) -> None:
        self.leave(seq.seq_id)

    def released(self, seq_id: int) -> None:
        self.leave(seq_id)

    def leave(self, target_id: int) -> None:
        """Drop the companion of a target that lost its blocks, ended, or failed to draft."""
        self.tracker.leave(target_id)
        self._drafts.pop(target_id, None)
        if (reader := self._readers.pop(target_id, None)) is not None:
            self.runner.signals.drop(reader.seq_id)
