"""Compute one step's forward pass and commit its tokens."""

from __future__ import annotations

import logging

import torch

from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.request.request import Scheduled
from kvreclaim.engine.step.output_processor import CheckedLogits, OutputProcessor
from kvreclaim.schedule import StepDone, StepPlan

logger = logging.getLogger(__name__)


class StepExecutor:
    """Runs a plan's forward pass and commits it. A request that fails ends; the others go on."""

    def __init__(self, runner: ModelRunner, lifecycle: Lifecycle, outputs: OutputProcessor) -> None:
        self.runner, self.lifecycle, self.outputs = runner, lifecycle, outputs

    def compute(self, plan: StepPlan, step: list[Scheduled]) -> CheckedLogits | None:
        """Return the step's checked logits; None if no sequence has any.

        Blocks are prepared once, also in steps without rows, because a preempted sequence may leave blocks to
        be moved. If that fails, the blocks' contents are unknown, and every request of the step ends.
        """
        try:
            self.runner.prepare(plan)
        except Exception as error:
            self.lifecycle.unmoved(plan)
            for request in {item.seq.request_id: item.seq.request for item in step}.values():
                self.lifecycle.invalidate(request)
                self.lifecycle.fail(request, error, "preparing blocks for")
            return None
        if not step:
            return None
        try:
            logits, positions_by_item = self.runner.forward(step)
        except Exception as error:
            if len(step) == 1 and not step[0].row.num_drafts:
                self.lifecycle.fail(step[0].seq.request, error, "computing")
                return None
            logger.exception("a forward pass of %d sequences failed; running each alone", len(step))
            step, logits, positions_by_item = self._forward_each([item.without_drafts() for item in step])
        return self.outputs.check_logits(step, logits, positions_by_item) if step else None

    def _forward_each(self, step: list[Scheduled]) -> tuple[list[Scheduled], torch.Tensor, list[range]]:
        """Isolate a failure. Nothing has been committed, so every sequence is tried once more alone, without
        its drafts, which may be the cause.

        Returns: the items that can be computed, and the results of forward for them.
        """
        done: list[Scheduled] = []
        rows: list[torch.Tensor] = []
        positions_by_item: list[range] = []
        for item in step:
            if item.seq.finish_reason is None:
                with self.lifecycle.contained(item.seq.request, "computing"):
                    logits, positions = self.runner.forward([item])
                    done.append(item)
                    rows.append(logits.clone())  # CUDA graphs overwrite their output buffer
                    positions_by_item += positions
        return done, torch.cat(rows) if rows else torch.empty(0), positions_by_item

    def commit(self, plan: StepPlan, checked: CheckedLogits | None) -> None:
        """Report the computed tokens and the accepted drafts to the scheduler."""
        sound = () if checked is None else checked.sound
        num_accepted = {} if checked is None else self.outputs.accept_drafts(checked)
        computed = () if checked is None else tuple([seq.seq_id for seq in checked.sequences])
        sequences = self.lifecycle.sequences
        for seq_id, error in self.lifecycle.scheduler.update_from_output(
            plan, StepDone(computed, num_accepted=num_accepted)
        ):
            if seq_id in sequences:
                self.lifecycle.fail(sequences[seq_id].request, error, "committing")
        if num_accepted:
            self._record(num_accepted)
        begun = {one.seq_id for one in plan.admitted}
        for item, _, _ in sound:
            try:
                self._note_computed(item, has_begun=item.seq.seq_id in begun)
            except Exception as error:
                self.lifecycle.fail(item.seq.request, error, "committing")

    def _record(self, num_accepted: dict[int, int]) -> None:
        """Store the signals of rows with drafts, once it is known which drafts are accepted."""
        num_accepted = {
            seq_id: count for seq_id, count in num_accepted.items() if seq_id in self.lifecycle.sequences
        }
        try:
            self.runner.record(num_accepted)
        except Exception as error:
            for seq_id in num_accepted:
                self.lifecycle.fail(self.lifecycle.sequences[seq_id].request, error, "recording signals of")

    def _note_computed(self, item: Scheduled, *, has_begun: bool) -> None:
        """Update figures of a sequence after its tokens were committed. Its prompt is pinned whenever it has
        been computed. has_begun: the sequence was admitted in this step, maybe with all of its prompt."""
        seq, request = item.seq, item.seq.request
        if seq.finish_reason is not None:
            return
        memory, totals = self.lifecycle.memory, self.lifecycle.totals
        seq.note_blocks(memory.num_blocks(seq.seq_id))
        if item.row.first >= seq.num_prompt and request.prompt_done and not has_begun:
            return
        totals.prompt_tokens += max(0, min(seq.num_computed, seq.num_prompt) - item.row.first)
        if seq.num_computed < seq.num_prompt:
            return
        if not request.prompt_done:
            request.prompt_done = True
            totals.prompts_done += 1
            request.metrics.num_indexed_tokens = min(memory.indexed_len(seq.seq_id), seq.num_prompt)
            request.metrics.num_repeated_tokens = memory.table(seq.seq_id).repeated_len
        if request.spec.retention and (has_begun or item.row.first < seq.num_prompt):
            memory.pin(seq.seq_id, request.spec.retention, request.spec.tenant)
