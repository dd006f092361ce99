"""Companions follow their targets token by token, and are compressed on the way."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

from kvreclaim.compression.compressor import needs_of
from kvreclaim.compression.policy import Signal
from kvreclaim.engine.compact.job import CompactionJob
from kvreclaim.engine.compact.passes import CompressionPass
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.features.verification.companion_copier import CompanionCopier, CopyRange
from kvreclaim.engine.features.verification.companion_queries import QUERIES, CompanionQueries
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.request import Request, Scheduled, Sequence
from kvreclaim.engine.request.verify import Verify
from kvreclaim.schedule import Row, Status
from kvreclaim.schedule.budget.ledger import take_choice
from kvreclaim.schedule.companions import Companions

logger = logging.getLogger(__name__)

Pair = tuple[Sequence, Sequence]
"""A target and its companion."""


class CompanionTracker:
    """Begins companions and keeps them level with their targets.

    A companion in its target's pool begins at the end of the prompt, as a fork: it shares all blocks, costs
    nothing, and its first pass chooses from the whole full cache. A companion follows from the first token on
    if its policy sums attention, or if full caches are in host memory. It then receives the target's tokens
    range by range and is compressed in between, like a compressed request. It receives exact keys and values
    of the full cache. They overwrite the keys and values that it computed while drafting.
    """

    def __init__(
        self,
        lifecycle: Lifecycle,
        runner: ModelRunner,
        compression: CompressionPass,
        companions: Companions[Sequence],
        copier: CompanionCopier,
    ) -> None:
        self.lifecycle, self.runner, self.compression = lifecycle, runner, compression
        self.companions, self.copier = companions, copier
        self.queries = CompanionQueries(runner.signals)
        self._forks = companions.memory is lifecycle.memory
        self._unborn: dict[int, Sequence] = {}

    def follow(self, computed: Iterable[Sequence]) -> None:
        """Bring the companions of these sequences, which have advanced, up to date."""
        self.forget_gone()
        running = [seq for seq in computed if is_target(seq) and seq.status is Status.RUNNING]
        targets = [seq for seq in running if not verify_of(seq).eviction_method.sparse_reads]
        try:
            pairs = [(target, companion) for target in targets if (companion := self._companion(target))]
            self._compress([(target, companion) for target, companion in pairs if companion.is_due])
            while pairs:
                pairs = self._advance(pairs)
        except Exception as error:
            self.failed("following %d sequences", len(targets), error)
            for target in targets:
                self.leave(target.seq_id)
        self.queries.clear()

    def _companion(self, target: Sequence) -> Sequence | None:
        """Return the target's companion. A new one is begun if it is due and there is room."""
        verify, companion = verify_of(target), self.companions.get(target)
        if companion is not None and verify.is_short and self._can_begin(target):
            self.leave(target.seq_id)
            companion = None
        verify.is_short = False
        if companion is None:
            self._note_prompt(target)
            return self._begin(target) if self._can_begin(target) else None
        adjust(companion, target)
        companion.token_ids[companion.num_computed :] = target.token_ids[companion.num_computed :]
        return companion

    def _can_begin(self, target: Sequence) -> bool:
        """Return whether the signals for the policy of a companion that begins now are complete."""
        needs = needs_of(verify_of(target).compressor)
        from_first = self.queries.begins(target)
        if Signal.ATTENTION_MASS in needs:
            return from_first or self._forks
        if not self._forks:
            return from_first or not needs & QUERIES
        return target.num_computed >= target.num_prompt

    def _note_prompt(self, target: Sequence) -> None:
        """Keep the queries of an incomplete prompt for the companion that is forked at its end."""
        needs = needs_of(verify_of(target).compressor)
        sums_attention = Signal.ATTENTION_MASS in needs
        if self._forks and not sums_attention and needs & QUERIES and target.num_computed < target.num_prompt:
            unborn = self._unborn.setdefault(target.seq_id, self.new(target))
            self._note_queries(target, unborn, self.queries.first(target))

    def _begin(self, target: Sequence) -> Sequence | None:
        verify = verify_of(target)
        if not self.companions.has_room(target, verify.footprint, verify.num_tokens):
            return None
        companion = self._unborn.pop(target.seq_id, None) or self.new(target)
        companion.token_ids[:] = target.token_ids
        sums_attention = Signal.ATTENTION_MASS in needs_of(verify.compressor)
        if not self._forks or (sums_attention and self.queries.begins(target)):
            self.companions.begin(target, companion)
            return companion
        self.companions.fork(target, companion, target)
        if needs_of(verify.compressor) & QUERIES:
            self._note_queries(target, companion, self.queries.first(target))
        return companion

    def new(self, target: Sequence) -> Sequence:
        """Return a companion without blocks that is not registered anywhere."""
        return Sequence(
            seq_id=self.lifecycle.new_id(),
            request_id=target.request_id,
            token_ids=list(target.token_ids),
            num_prompt=target.num_prompt,
            max_len=target.max_len,
            footprint=verify_of(target).footprint,
            request=shadow_of(target.request, verify_of(target)),
        )

    def _advance(self, pairs: list[Pair]) -> list[Pair]:
        """Copy each companion's next tokens, up to its next pass. Returns: the pairs that received any."""
        ranges = []
        for target, companion in pairs:
            gap = target.num_computed - companion.num_computed
            until = companion.footprint.tokens_until_pass(
                companion.num_computed, companion.num_prompt, companion.account
            )
            if gap <= 0 or companion.status is not Status.RUNNING:
                continue
            copy_range = CopyRange(target, companion, companion.num_computed, min(gap, until))
            if self.has_room(companion, copy_range.num_tokens):
                ranges.append(copy_range)
            else:
                self.leave(target.seq_id)
        if not ranges:
            return []
        self.copier.copy(ranges)
        for copy_range in ranges:
            self.companions.commit(copy_range.companion, copy_range.num_tokens)
            self._note_queries(copy_range.target, copy_range.companion, copy_range.first)
        advanced = [(copy_range.target, copy_range.companion) for copy_range in ranges]
        self._compress([(target, companion) for target, companion in advanced if companion.is_due])
        return advanced

    def _note_queries(self, target: Sequence, companion: Sequence, first: int) -> None:
        """Record signals of the companion's tokens from `first` on. A companion without tokens gets those of
        all tokens that the target has computed."""
        slots = None
        if companion.status is Status.RUNNING:
            row = Row(companion.seq_id, first, companion.num_computed - first)
            slots = self.runner.slots(Scheduled(companion, row))
        self.queries.note(target, companion, first, slots)

    def has_room(self, companion: Sequence, num_tokens: int) -> bool:
        """Return whether the companion has blocks for num_tokens more tokens; they are ready for writes."""
        growth = self.companions.grow(companion, num_tokens)
        if growth is None:
            return False
        self.runner.make_ready(growth.copies, growth.new_blocks)
        self.companions.memory.release_copy_sources()
        return True

    def _compress(self, due: list[Pair]) -> None:
        """Run the passes of companions. A companion that lacks blocks for its pass is dropped."""
        jobs, targets = [], []
        for target, companion in due:
            plan, compressor = self.companions.compress(companion), companion.request.compressor
            assert compressor is not None, f"companion {companion.seq_id} has no compression"
            if plan is None:
                self.leave(target.seq_id)
            else:
                jobs.append(CompactionJob(companion, compressor, plan))
                targets.append(target)
        outcomes = self.compression.run(jobs) if jobs else []
        for job, target, outcome in zip(jobs, targets, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.failed("compressing for drafts of request %s", target.request_id, outcome)
                self.leave(target.seq_id)
            elif job.plan.eviction_method.whole_blocks:
                account, memory = job.seq.account, self.companions.memory
                take_choice(job.plan, outcome.gone, outcome.prompt_slots, account, memory)

    def leave(self, target_id: int) -> None:
        """Drop a target's companion, and the queries kept for a later one."""
        for companion in (self.companions.leave(target_id), self._unborn.pop(target_id, None)):
            if companion is not None:
                self.runner.signals.drop(companion.seq_id)

    def forget_gone(self) -> None:
        """Forget the signals of companions that were evicted."""
        for companion in self.companions.gone:
            self.runner.signals.drop(companion.seq_id)
        self.companions.gone.clear()

    def failed(self, action: str, subject: object, error: Exception) -> None:
        """Log and count a failure. It costs drafts only. action: a format string for `subject`."""
        self.lifecycle.totals.speculation.num_failed += 1
        logger.error(action + " failed; they go on without drafts", subject, exc_info=error)


def shadow_of(request: Request, verify: Verify) -> Request:
    """Return the target's request for its companion: compressed, without reports."""
    return replace(
        request,
        spec=replace(request.spec, params=replace(request.params, logprobs=None, prompt_logprobs=None)),
        compressor=verify.compressor,
        state={kind: kept for kind, kept in request.state.items() if kind is not Verify},
        sequences=[],
        prompt_logprobs=None,
        metrics=RequestMetrics(),
    )


def adjust(companion: Sequence, target: Sequence) -> None:
    """Set the companion's footprint and request to the target's current automatic budget."""
    verify = verify_of(target)
    if companion.request.compressor is not verify.compressor:
        companion.footprint, companion.request = verify.footprint, shadow_of(target.request, verify)


def is_target(seq: Sequence) -> bool:
    """Return whether a compressed cache drafts for the sequence."""
    return seq.request.verify is not None and seq.finish_reason is None


def verify_of(target: Sequence) -> Verify:
    """Return the verify settings of a target's request."""
    verify = target.request.verify
    assert verify is not None, f"sequence {target.seq_id} is not verified"
    return verify
