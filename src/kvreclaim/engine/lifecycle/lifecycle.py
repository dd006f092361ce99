"""Begin and end requests and their sequences. An error ends its own request only."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from kvreclaim.compression.compressor import Compressor, needs_of
from kvreclaim.compression.policy import Signal
from kvreclaim.engine.extension import Extensions, HitLostError
from kvreclaim.engine.request.outputs import EngineTotals, FinishReason
from kvreclaim.engine.request.request import Request, Scheduled, Sequence
from kvreclaim.engine.sampling.detokenizer import Detokenizer
from kvreclaim.engine.signals.needs import chunk_salt, prefix_salt
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.loader import LoadedModel
from kvreclaim.schedule import Footprint, Scheduler, Status, StepPlan
from kvreclaim.schedule.step import Admitted

logger = logging.getLogger(__name__)


class Lifecycle:
    """The requests in flight. Only this class frees the blocks and state of a sequence.

    requests:  by id, those with a sequence that has not ended
    sequences: by id, those that have not ended
    touched:   by request id, those that got tokens or ended since the engine last emptied it
    """

    def __init__(
        self,
        loaded: LoadedModel,
        memory: MemoryManager,
        signals: Signals,
        scheduler: Scheduler[Sequence],
        extensions: Extensions,
        totals: EngineTotals,
    ) -> None:
        self.loaded, self.memory, self.signals = loaded, memory, signals
        self.scheduler, self.extensions, self.totals = scheduler, extensions, totals
        self.requests: dict[str, Request] = {}
        self.touched: dict[str, Request] = {}
        self.sequences: dict[int, Sequence] = {}
        self._seq_ids = itertools.count()

    def begin(
        self,
        request: Request,
        token_ids: list[int],
        footprint: Footprint,
        *,
        queued: bool = True,
    ) -> None:
        """Take the request in, with its first sequence. queued: at once, or when `queue` is called"""
        seq = self.new_sequence(request, 0, token_ids, footprint)
        seq.seats = request.num_seats
        if request.lacks_prompt_logprobs:
            seq.max_prefix_hit = 0
        elif request.scores is not None:
            seq.max_prefix_hit = seq.num_prompt - 1
        self.requests[request.request_id] = request
        for feature in request.features:
            feature.begin(seq)
        if queued:
            self.queue(request)

    def new_id(self) -> int:
        """Return an id for a new sequence."""
        return next(self._seq_ids)

    def queue(self, request: Request) -> None:
        """Queue the request's first sequence."""
        self.scheduler.add(request.sequences[0])

    def follow(self, plan: StepPlan) -> list[Scheduled]:
        """Apply a plan's preemptions and admissions to sequences. Returns: the items to compute."""
        for lost in plan.preempted:
            seq = self.sequences[lost.seq_id]
            for extension in self.extensions.ordered:
                extension.preempted(seq, parked=lost.parked)
            if lost.parked:
                self.totals.swaps += 1
            else:
                self._drop_signals(seq)
                self._compute_anew(seq)
            seq.request.metrics.preemptions += 1
            self.totals.preemptions[lost.reason] += 1
        for extension in self.extensions.ordered:
            extension.planned(plan)
        for begun in plan.admitted:
            seq = self.sequences[begun.seq_id]
            if not begun.resumed:
                self._compute_anew(seq)
            if not self._admit(seq, begun):
                continue
            metrics = seq.request.metrics
            if metrics.queue_s is None:  # for the first time
                metrics.num_cached_tokens, metrics.num_loaded_tokens = begun.num_hit, begun.num_loaded
                metrics.num_snapshot_tokens = 0 if begun.snapshot is None else begun.num_hit
        for extension in self.extensions.ordered:
            extension.begun(plan)
        for seq_id, error in plan.failed:
            if seq_id in self.sequences:
                self.fail(self.sequences[seq_id].request, error, "scheduling")
        rows = [(self.sequences.get(row.seq_id), row) for row in plan.rows]
        return [Scheduled(seq, row) for seq, row in rows if seq is not None and seq.status is Status.RUNNING]

    def _admit(self, seq: Sequence, begun: Admitted) -> bool:
        """Notify the extensions that a sequence begins. Returns: whether it does."""
        with self.contained(seq.request, "beginning"):
            try:
                for extension in self.extensions.ordered:
                    extension.admitted(seq, begun)
            except HitLostError:
                logger.exception("request %s begins without its prefix hit", seq.request_id)
                self._drop_signals(seq)
                self._compute_anew(seq)
                self.scheduler.put_back(seq)
                return False
        return True

    def _drop_signals(self, seq: Sequence) -> None:
        if not seq.request.is_plain:
            self.signals.drop(seq.seq_id)

    def _compute_anew(self, seq: Sequence) -> None:
        """Drop all state of a sequence and its followers, including logits of beams that wait for it."""
        for each in (seq, *seq.followers):
            for extension in self.extensions.ordered:
                extension.reset(each.seq_id)
        if seq.request.beams is not None:
            seq.request.beams.rows.clear()

    def unmoved(self, plan: StepPlan) -> None:
        """Forget the moves of a plan between blocks and host, which may have failed: the blocks leave the
        prefix index, and parked sequences are recomputed. The caller handles the sequences that the plan
        computes."""
        for _, block in plan.swap_in:
            self.memory.pool.unindex(block)
        for lost in plan.preempted:
            seq = self.sequences.get(lost.seq_id)
            if lost.parked and seq is not None and seq.status is Status.WAITING:
                for extension in self.extensions.ordered:
                    extension.lost(seq)
                seq.reset()
                self._compute_anew(seq)
        for extension in self.extensions.ordered:
            extension.unmoved(plan)

    @contextmanager
    def contained(self, request: Request, doing: str) -> Iterator[None]:
        """End this request alone if the block raises. doing: for the log, e.g. "compressing"."""
        try:
            yield
        except Exception as error:
            self.fail(request, error, doing)

    def fail(self, request: Request, error: Exception, doing: str) -> None:
        """End a request with reason "error". The log names the request and the operation, not its text.

        error: an InvalidArgumentError is the caller's mistake, and is reported to the caller
        """
        if isinstance(error, InvalidArgumentError):
            logger.warning("%s request %s failed: %s", doing, request.request_id, error)
            request.refusal = error
        else:
            logger.error("%s request %s failed", doing, request.request_id, exc_info=error)
        request.error = f"{type(error).__name__}: {error}"
        self.end_request(request, "error")

    def invalidate(self, request: Request) -> None:
        """Remove the blocks of the request's sequences, hits included, from the prefix index: their contents
        may be wrong, so the same prompt is recomputed."""
        for seq in request.sequences:
            for extension in self.extensions.ordered:
                extension.invalidated(seq)
            if seq.status is Status.RUNNING:
                self.memory.invalidate(seq.seq_id)

    def end_request(self, request: Request, reason: FinishReason) -> None:
        """End its sequences that have not ended."""
        for seq in request.sequences:
            if seq.finish_reason is None:
                self.end(seq, reason)

    def end(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence and free its blocks. The request ends with its last sequence."""
        request = seq.request
        if seq.detokenizer is not None and reason != "error":
            try:
                seq.detokenizer.finish()
            except Exception as error:
                self.fail(request, error, "ending the text of")
                return
        seq.finish_reason = reason
        self.touched[request.request_id] = request
        if request.parent is None:
            self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1
        if request.finished:
            request.metrics.e2e_s = time.perf_counter() - request.arrival_s
            self.requests.pop(request.request_id, None)
            for child in request.children:
                self.end_request(child, "abort")
        if reason != "error":
            self._ending(seq)
        self.release(seq)

    def _ending(self, seq: Sequence) -> None:
        retention = [kept for kept in seq.request.spec.retention if kept.num_tokens > seq.num_prompt]
        if retention and seq.status is Status.RUNNING:
            self.memory.pin(seq.seq_id, retention, seq.request.spec.tenant)
        for extension in self.extensions.ordered:
            try:
                extension.ending(seq)
            except Exception:
                logger.exception("keeping what is left of request %s failed", seq.request_id)

    def release(self, seq: Sequence) -> None:
        """Free the blocks and state of a sequence that has ended."""
        self.sequences.pop(seq.seq_id, None)
        for extension in self.extensions.ordered:
            try:
                extension.released(seq.seq_id)
            except Exception:
                logger.exception("releasing what is kept for request %s failed", seq.request_id)
        try:
            self.scheduler.remove(seq)
            self._drop_signals(seq)
        except Exception:
            logger.exception("returning the blocks of request %s failed", seq.request_id)

    def new_sequence(
        self, request: Request, index: int, token_ids: list[int], footprint: Footprint
    ) -> Sequence:
        """Add a further sequence of a request, with these tokens so far."""
        params, tokenizer = request.params, self.loaded.tokenizer
        generator = None
        if params.temperature > 0 and request.beams is None:
            generator = torch.Generator()
            generator.manual_seed((request.seed * 65_537 + index) % 2**63)
        detokenizer = None
        if tokenizer is not None and params.detokenize and request.beams is None:
            detokenizer = Detokenizer(
                tokenizer,
                params.stop_strings,
                skip_special_tokens=params.skip_special_tokens,
                include_stop=params.include_stop_str_in_output,
            )
        seq_id, is_plain = next(self._seq_ids), request.is_plain and request.parent is None
        seq = Sequence(
            seq_id=seq_id,
            request_id=request.request_id,
            token_ids=token_ids,
            num_prompt=len(request.prompt_token_ids),
            max_len=request.max_len,
            index=index,
            first_id=request.sequences[0].first_id if request.sequences else seq_id,
            footprint=footprint,
            priority=request.spec.priority,
            tenant=request.spec.tenant,
            cache_salt=request.spec.cache_salt if is_plain else salt_of(request),
            lasting=is_plain or Signal.TOKEN_SCORES not in needs_of(compressor_of(request)),
            request=request,
            generator=generator,
            detokenizer=detokenizer,
            gang=request.beams is not None,
            rule=request.rule,
            reader=None if request.beams is not None else request.reader,
        )
        self.sequences[seq_id] = seq
        request.sequences.append(seq)
        return seq


def salt_of(request: Request) -> str | None:
    """Return the salt of the request's blocks. Blocks of a chunk are found by prompts that reuse it."""
    salt = request.spec.cache_salt
    if request.parent is not None and request.reuse is None:
        return chunk_salt(salt)
    return prefix_salt(salt, compressor_of(request), request.sparse_prefill)


def compressor_of(request: Request) -> Compressor | None:
    """Return the compressor of the request, or of its companions."""
    return request.compressor if request.verify is None else request.verify.compressor
