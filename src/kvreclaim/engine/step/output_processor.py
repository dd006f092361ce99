"""Turn a step's logits into tokens, scores and log-probabilities, then run the due passes."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.compact.job import CompactionJob
from kvreclaim.engine.compact.passes import CompressionPass
from kvreclaim.engine.lifecycle.branches import Branches
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.request.outputs import FinishReason
from kvreclaim.engine.request.request import Beams, Request, Scheduled, Sequence
from kvreclaim.engine.sampling.logprobs import report_prompt
from kvreclaim.engine.sampling.sampler import SampledToken, SampleRow, draw
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.schedule import Pass


@dataclass(frozen=True, slots=True, eq=False)
class CheckedLogits:
    """The logits of a step after the check for finite numbers.

    best:  the argmax of each row
    sound: items with finite rows, with their positions and their rows of logits
    sequences: of these items
    """

    logits: Tensor
    best: list[int]
    sound: list[tuple[Scheduled, range, slice]]
    sequences: list[Sequence]


class OutputProcessor:
    """Gives each sequence the tokens, scores and passes of its rows. A failure ends its own request only.

    passes: since the engine last took them
    """

    def __init__(self, lifecycle: Lifecycle, compression: CompressionPass) -> None:
        self.lifecycle, self.branches = lifecycle, Branches(lifecycle)
        self.compression = compression
        self.totals = lifecycle.totals
        self.passes: list[tuple[Request, Pass[int]]] = []
        self._ended: list[tuple[Sequence, FinishReason]] = []
        self._eos_token_ids = lifecycle.loaded.eos_token_ids

    def take_passes(self) -> list[tuple[Request, Pass[int]]]:
        """Return the passes since the last call."""
        passes, self.passes = self.passes, []
        return passes

    def check_logits(self, step: list[Scheduled], logits: Tensor, owned: list[range]) -> CheckedLogits:
        """Check that logits are finite before they are used. Requests with others end, and their blocks leave
        the prefix index.

        logits: [rows, V]; owned: per item the positions of its rows, in order. An item without positions has
                one row, which is only checked
        """
        best = logits.max(-1)  # one pass: a NaN anywhere in a row is its maximum
        both = torch.stack((best.values.double(), best.indices.double())).cpu().numpy()  # one wait
        finite, argmax = np.isfinite(both[0]).tolist(), both[1].astype(np.int64).tolist()
        sound, row = [], 0
        is_sound = all(finite)
        for item, positions in zip(step, owned, strict=True):
            rows = slice(row, row + (len(positions) or 1))
            row = rows.stop
            if item.seq.finish_reason is not None:
                continue
            if is_sound:
                sound.append((item, positions, rows))
            elif item.row.num_drafts and finite[rows.start]:  # rows after a wrong draft may be invalid
                end = next((at for at in range(rows.start, rows.stop) if not finite[at]), rows.stop)
                sound.append((item, positions, slice(rows.start, end)))
            elif all(finite[rows]):
                sound.append((item, positions, rows))
            else:
                error = ValueError("the model's logits are not finite numbers (NaN or infinite)")
                self.lifecycle.invalidate(item.seq.request)
                self.lifecycle.fail(item.seq.request, error, "computing")
        return CheckedLogits(logits, argmax, sound, [item.seq for item, _, _ in sound])

    def accept_drafts(self, checked: CheckedLogits) -> dict[int, int]:
        """Verify drafts, before the step's tokens are committed. For each sequence with drafts, draw the
        token after each of its tokens, up to the first draft that differs.

        Returns: accepted tokens of its row by seq_id. Sequences that have ended end in `process`.
        """
        items: list[tuple[Scheduled, slice]] = []
        num_accepted: dict[int, int] = {}
        for item, _, rows in checked.sound:
            if item.row.num_drafts:
                items.append((item, rows))
            elif item.cut:
                num_accepted[item.seq.seq_id] = item.row.num_tokens
        drafted = items
        for depth in itertools.count():
            if not items:
                break
            sample_rows = []
            for item, rows in items:
                with self.lifecycle.contained(item.seq.request, "asking for a token of"):
                    sample_rows.append((item, rows, item.seq.sample_row(self._eos_token_ids)))
            places = [rows.start + depth for _, rows, _ in sample_rows]
            drawn = draw(checked.logits, checked.best, places, [each for _, _, each in sample_rows])
            items = []
            for (item, rows, _), each in zip(sample_rows, drawn, strict=True):
                if item.seq.finish_reason is None:
                    num_accepted[item.seq.seq_id] = depth + 1
                    if self._agrees(item, depth, each) and rows.start + depth + 1 < rows.stop:
                        items.append((item, rows))
        for item, _ in drafted:
            accepted = num_accepted.get(item.seq.seq_id, 1) - 1
            self.totals.speculation.note(item.row.num_drafts, accepted)
        return num_accepted

    def _agrees(self, item: Scheduled, depth: int, drawn: SampledToken | Exception) -> bool:
        """Append a token. Return whether the sequence goes on, and its next draft is this token."""
        seq = item.seq
        if isinstance(drawn, Exception):
            if _may_end(seq, drawn):
                self._ended.append((seq, "stop"))
            else:
                self.lifecycle.fail(seq.request, drawn, "drawing a token of")
            return False
        self.lifecycle.touched[seq.request_id] = seq.request
        with self.lifecycle.contained(seq.request, "taking a token of"):
            if (reason := self._append_token(seq, drawn)) is not None:
                self._ended.append((seq, reason))
                return False
            return depth < item.row.num_drafts and seq.draft_ids[depth] == drawn.token
        return False

    def process(self, checked: CheckedLogits) -> None:
        """Draw, score, and compress due sequences, after the step's tokens have been committed. Sequences
        that are about to share blocks are compressed first."""
        ended, self._ended = self._ended, []
        for seq, reason in ended:
            if seq.finish_reason is None:
                self.lifecycle.end(seq, reason)
        draws: list[tuple[Sequence, int]] = []
        computed = checked.sequences
        if forking := [seq for seq in computed if seq.is_to_fork]:
            self.compress(forking)
            self._fork_beams(forking)
        searches: dict[str, tuple[Request, Beams]] = {}
        for item, positions, rows in checked.sound:
            seq, request = item.seq, item.seq.request
            if not positions or seq.finish_reason is not None or item.row.num_drafts:
                continue
            self.lifecycle.touched[seq.request_id] = request
            if request.prompt_logprobs is not None and request.lacks_prompt_logprobs:
                self._note_prompt(seq, positions, checked.logits[rows])
            if request.scores is not None:
                self._score(seq, positions, checked.logits[rows])
            elif positions.stop < len(seq.token_ids):
                continue
            elif request.beams is not None:
                request.beams.rows[seq.seq_id] = checked.logits[rows.stop - 1]
                searches[request.request_id] = request, request.beams
            else:
                draws.append((seq, rows.stop - 1))
        self._draw(draws, checked.logits, checked.best)
        if searches:
            self._search(list(searches.values()))
        self.compress(computed)
        for extension in self.lifecycle.extensions.ordered:
            for seq in computed:
                if seq.finish_reason is None:
                    try:
                        extension.processed(seq)
                    except Exception as error:
                        self.lifecycle.fail(seq.request, error, "processing")

    def _fork_beams(self, sequences: list[Sequence]) -> None:
        """Fork the beams of sequences at the token where their followers diverge."""
        for seq in sequences:
            if seq.followers and seq.num_computed == seq.fork_at and seq.finish_reason is None:
                with self.lifecycle.contained(seq.request, "forking the beams of"):
                    self.branches.fork_followers(seq)

    def _search(self, searches: list[tuple[Request, Beams]]) -> None:
        """Choose the next beams of requests with all beams computed. Others keep the rows they have."""
        ready = []
        for request, beams in searches:
            if request.finished:
                continue
            if all(seq.seq_id in beams.rows for seq in request.sequences):
                ready.append((request, beams))
            else:  # the logits' buffer may be overwritten
                beams.rows = {seq_id: row.clone() for seq_id, row in beams.rows.items()}
        for request, beams in ready:
            if not request.finished:
                with self.lifecycle.contained(request, "searching for"):
                    self._choose(request, beams)

    def _choose(self, request: Request, beams: Beams) -> None:
        rows = torch.stack([beams.rows[seq.seq_id] for seq in request.sequences])
        beams.rows.clear()
        if not beams.begun:
            beams.begun = True
            rows = rows.expand(request.num_seats, -1)
            request.metrics.ttft_s = time.perf_counter() - request.arrival_s
        chosen = beams.search.step(rows)
        if chosen:
            self.branches.reorder(request, chosen)
            self.totals.generation_tokens += len(chosen)
        else:
            self.branches.conclude(request)

    def compress(self, sequences: list[Sequence]) -> None:
        """Bring sequences that are due back to their budgets."""
        jobs, scheduler = [], self.lifecycle.scheduler
        for seq in sequences:
            for feature in seq.request.before_passes:
                with self.lifecycle.contained(seq.request, f"running {type(feature).__name__} of"):
                    feature.before_pass(seq)
            if seq.request.compressor is None:
                continue
            try:
                if seq.is_due:
                    jobs += [self._job(plan) for plan in scheduler.compress([seq])]
            except Exception as error:
                self.lifecycle.fail(seq.request, error, "compressing")
        if not jobs:
            return
        with torch.inference_mode():
            outcomes = self.compression.run(jobs)
        for job, outcome in zip(jobs, outcomes, strict=True):
            if job.seq.finish_reason is not None:
                continue
            if isinstance(outcome, Exception):
                self.lifecycle.fail(job.seq.request, outcome, "compressing")
                continue
            with self.lifecycle.contained(job.seq.request, "compressing"):
                plan = job.plan
                if plan.eviction_method.whole_blocks:
                    plan = scheduler.compressed(plan, outcome.gone, outcome.prompt_slots)
                self.passes.append((job.seq.request, plan))
                for extension in self.lifecycle.extensions.ordered:
                    extension.compressed(job.seq, plan, outcome.kept)

    def _job(self, plan: Pass[int]) -> CompactionJob:
        seq, size = self.lifecycle.sequences[plan.seq_id], self.lifecycle.memory.block_size
        assert seq.request.compressor is not None, f"sequence {seq.seq_id} has no compression"
        self.totals.compactions += 1
        self.totals.tokens_evicted += plan.num_tokens - plan.keep
        self.totals.blocks_perfect += blocks_for(plan.num_tokens, size) - blocks_for(plan.keep, size)
        return CompactionJob(seq, seq.request.compressor, plan)

    def _note_prompt(self, seq: Sequence, positions: range, logits: Tensor) -> None:
        """Report the prompt tokens that these positions predict; logits [len(positions), V]."""
        request = seq.request
        known, num_top = request.prompt_logprobs, request.params.prompt_logprobs
        assert known is not None, f"request {request.request_id} did not ask"
        assert num_top is not None, f"request {request.request_id} did not ask"
        with self.lifecycle.contained(request, "reading the prompt's log-probabilities of"):
            first = positions.start + 1
            assert first == len(known), f"token {first} comes after {len(known)} known ones"
            given = request.prompt_token_ids[first : positions.stop + 1]
            known += report_prompt(logits[: len(given)], given, num_top)
            if not request.lacks_prompt_logprobs:
                seq.max_prefix_hit = None

    def _score(self, seq: Sequence, positions: range, logits: Tensor) -> None:
        """Score the continuation tokens that these positions predict; logits [len(positions), V]."""
        scores = seq.request.scores
        assert scores is not None, f"request {seq.request.request_id} is not scored"
        with self.lifecycle.contained(seq.request, "scoring"):
            given = seq.token_ids[positions.start + 1 : positions.stop + 1]
            scores.record(positions.start + 1 - seq.num_prompt, given, logits)
            if seq.num_computed >= len(seq.token_ids) - 1:
                self.lifecycle.end(seq, "length")

    def _draw(self, draws: list[tuple[Sequence, int]], logits: Tensor, best: list[int]) -> None:
        """Draw one token per sequence. A sequence that waits for its fork draws one for each sibling."""
        outputs: list[tuple[Sequence, int, int | None]] = []  # with the argmax and the index in `sampled`
        rows: list[int] = []
        sampled: list[SampleRow] = []
        for seq, row in draws:
            try:
                if seq.seats == 1 and seq.takes_argmax:
                    outputs.append((seq, best[row], None))
                    continue
                siblings = self._with_forks(seq) if seq.waits_for_fork else [seq]
                inputs = [one.sample_row(self._eos_token_ids) for one in siblings]
            except Exception as error:
                self.lifecycle.fail(seq.request, error, "asking for a token of")
                continue
            outputs += [(one, best[row], place) for place, one in enumerate(siblings, len(sampled))]
            rows += [row] * len(siblings)
            sampled += inputs
        drawn = draw(logits, best, rows, sampled) if sampled else []
        for seq, token, place in outputs:
            if seq.finish_reason is None:
                self._take_token(seq, token if place is None else drawn[place])

    def _with_forks(self, seq: Sequence) -> list[Sequence]:
        """Return a sequence with a complete prompt, and its forks, which all draw from its row."""
        return [seq, *self.branches.fork(seq)] if seq.finish_reason is None else []

    def _take_token(self, seq: Sequence, drawn: int | SampledToken | Exception) -> None:
        if isinstance(drawn, Exception):
            if _may_end(seq, drawn):
                self.lifecycle.end(seq, "stop")
            else:
                self.lifecycle.fail(seq.request, drawn, "drawing a token of")
            return
        try:
            if (reason := self._append_token(seq, drawn)) is not None:
                self.lifecycle.end(seq, reason)
        except Exception as error:
            self.lifecycle.fail(seq.request, error, "taking a token of")

    def _append_token(self, seq: Sequence, drawn: int | SampledToken) -> FinishReason | None:
        """Append a token. Returns: the reason why the output ends with it; None if it goes on."""
        request, params = seq.request, seq.request.spec.params
        token = drawn if isinstance(drawn, int) else drawn.token
        if not isinstance(drawn, int) and drawn.logprobs is not None:
            seq.logprobs.append(drawn.logprobs)
        if request.metrics.ttft_s is None:
            request.metrics.ttft_s = time.perf_counter() - request.arrival_s
        seq.token_ids.append(token)
        complete = seq.rule is not None and seq.rule.take(token)
        if seq.reader is not None:
            seq.reader.take(token)
        self.totals.generation_tokens += 1
        may_stop = len(seq.token_ids) - seq.num_prompt >= params.min_tokens
        is_eos = token in self._eos_token_ids and not params.ignore_eos
        is_stop = params.stop_token_ids is not None and token in params.stop_token_ids
        ends, stop = may_stop and (is_eos or is_stop), None
        if seq.detokenizer is not None and (not ends or params.include_stop_str_in_output):
            stop = seq.detokenizer.append(
                token,
                may_stop=may_stop and not ends,
                num_answer=None if seq.reader is None else seq.reader.num_answer,
                is_unsure=seq.reader is not None and seq.reader.is_unsure,
            )
        if ends or stop is not None:
            seq.stop_reason = stop if stop is not None else (token if is_stop and not is_eos else None)
            return "stop"
        if complete:
            return "stop"
        return "length" if len(seq.token_ids) >= request.max_len else None


def _may_end(seq: Sequence, drawn: Exception) -> bool:
    """Return whether an output for which no token was drawn is complete by its rule. min_tokens or bad_words
    then bar all tokens that could follow."""
    return isinstance(drawn, InvalidArgumentError) and seq.rule is not None and seq.rule.may_end
