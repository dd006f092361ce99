"""A request and its sequences: one prompt, n outputs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from kvreclaim import schedule
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.engine.request.chunk_reuse import Reuse
from kvreclaim.engine.request.compression_state import CompressionState
from kvreclaim.engine.request.hooks import FeatureHooks, TokenReader
from kvreclaim.engine.request.outputs import (
    CompletionOutput,
    FinishReason,
    Grown,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
)
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.request.verify import Verify
from kvreclaim.engine.sampling.beam_search import BeamSearch, Hypothesis
from kvreclaim.engine.sampling.detokenizer import Detokenizer
from kvreclaim.engine.sampling.logprobs import Logprob, PromptLogprobs
from kvreclaim.engine.sampling.rule import OutputRule
from kvreclaim.engine.sampling.sampler import SampleRow, completing
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.memory.block_table import BlockTable
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule.budget.account import EvictionCounters


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(schedule.ScheduledSequence):
    """One output in progress, with the state that produces its tokens and text.

    state:      of its eviction method
    row_cache:  (version, block ids) of the block table in the kernels' format
    cell_cache: (version, cells of each head), where heads have their own tables
    window_cache: of each window (version, block ids of each group of layers)
    hypothesis: the result of a beam search that it shows, if any
    rule, reader: of features: a restriction of its tokens, a view of its text so far
    """

    token_ids: list[int]
    request: Request
    generator: torch.Generator | None = None
    detokenizer: Detokenizer | None = None
    state: CompressionState = field(default_factory=CompressionState)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    peak_blocks: int = 0
    answer_blocks: int = 0
    final_blocks: int = 0
    row_cache: tuple[int, np.ndarray] | None = None
    cell_cache: tuple[int, np.ndarray] | None = None
    window_cache: dict[int, tuple[int, tuple[np.ndarray, ...]]] = field(default_factory=dict)
    hypothesis: Hypothesis | None = None
    rule: OutputRule | None = None
    reader: TokenReader | None = None

    @property
    def waits_for_fork(self) -> bool:
        """Whether its siblings begin once its prompt is computed."""
        return self.seats > 1

    @property
    def slots_are_positions(self) -> bool:
        """Whether a token's position is its slot, not its place in the text."""
        compressor = self.request.compressor
        return compressor is not None and compressor.policy.cache_relative

    def block_row(self, table: BlockTable) -> np.ndarray:
        """[blocks] int32 ids of its table for the kernels; a hole names another block (never attended)."""
        known, ids = self.row_cache, table.block_ids
        if known is not None and known[0] == table.version:
            return known[1]
        if known is not None and known[0] == table.version - 1 and len(ids) > len(known[1]):
            row = np.append(known[1], np.array(ids[len(known[1]) :], dtype=np.int32))  # blocks were appended
        else:
            some = next((block for block in reversed(ids) if block is not None), 0)
            row = np.array([some if block is None else block for block in ids], dtype=np.int32)
        self.row_cache = table.version, row
        return row

    def note_blocks(self, num_held: int) -> None:
        """Record the blocks that its table holds after computing up to num_computed."""
        self.final_blocks = num_held
        if num_held > self.peak_blocks:
            self.peak_blocks = num_held
        if num_held > self.answer_blocks and self.num_computed > self.num_prompt:
            self.answer_blocks = num_held

    def reset(self) -> None:
        """Forget what was computed (preemption by recompute); the tokens stay known."""
        schedule.ScheduledSequence.reset(self)
        self.state = CompressionState()
        self.row_cache = None
        self.cell_cache = None
        self.window_cache = {}

    @property
    def takes_argmax(self) -> bool:
        """Whether the next token is the argmax of its row of logits, whatever that is."""
        request = self.request
        if not request.takes_argmax or self.rule is not None or self.reader is not None:
            return False
        return len(self.token_ids) - self.num_prompt >= request.spec.params.min_tokens

    def sample_row(self, eos_token_ids: frozenset[int]) -> SampleRow:
        """The sampler's inputs for the next token."""
        params, words = self.request.params, self.request.bad_words
        forbidden: tuple[int, ...] = ()
        if self.num_generated < params.min_tokens:
            forbidden = tuple({*eos_token_ids, *(params.stop_token_ids or ())})
        penalizes = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
        generated = self.token_ids[self.num_prompt :] if penalizes or words else []
        if words:
            forbidden += completing(words, generated)
        forced = None if self.reader is None else self.reader.forced
        return SampleRow(
            params, self.request.prompt_token_ids, generated, forbidden, self.generator, self.rule, forced
        )

    def output(self) -> CompletionOutput:
        found = self.hypothesis
        return CompletionOutput(
            index=self.index,
            text=self.detokenizer.text if self.detokenizer else "",
            drawn=Grown(self.token_ids, self.num_prompt),
            reports=Grown(self.logprobs) if self.request.params.logprobs is not None else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            cumulative_logprob=None if found is None else found.cumulative,
            sequences_scores=None if found is None else found.score,
        )


@dataclass(frozen=True, slots=True, eq=False)
class Scheduled:
    """A sequence and the row that it computes in this step. cut: whether drafts of the plan were left out."""

    seq: Sequence
    row: schedule.Row
    cut: bool = False

    @property
    def num_tokens(self) -> int:
        return self.row.num_tokens

    @property
    def num_known(self) -> int:
        """Tokens of the row that are not drafts."""
        return self.row.num_tokens - self.row.num_drafts

    def without_drafts(self) -> Scheduled:
        """Return the item without its drafts."""
        if not self.row.num_drafts:
            return self
        return Scheduled(self.seq, replace(self.row, num_tokens=self.num_known, num_drafts=0), cut=True)

    @property
    def tokens(self) -> list[int]:
        """The tokens that are computed, drafts included."""
        known = self.seq.token_ids[self.row.first : self.row.first + self.num_known]
        return known + self.seq.draft_ids[: self.row.num_drafts] if self.row.num_drafts else known


@dataclass(slots=True, eq=False)
class Scores:
    """Filled in while a scored request is computed; index i belongs to continuation token i.

    observer: called with (first, log-probabilities [n, V] fp32) of continuation tokens first .. first + n - 1
              when they are computed, in order; called again after a preemption
    """

    predicted: list[int]
    logprobs: list[float]
    observer: Callable[[int, torch.Tensor], None] | None = None

    def record(self, first: int, given: list[int], logits: torch.Tensor) -> None:
        """Record continuation tokens first, first + 1, ...: `given`, with logits [len(given), V]."""
        index = torch.tensor(given, device=logits.device)[:, None]
        every = torch.log_softmax(logits.float(), -1)
        found = every.gather(-1, index)[:, 0]
        self.predicted[first : first + len(given)] = logits.argmax(-1).tolist()
        self.logprobs[first : first + len(given)] = found.tolist()
        if self.observer is not None:
            self.observer(first, every)


@dataclass(slots=True, eq=False)
class Beams:
    """A request's beam search, and the state of its sequences, the beams.

    rows:   by seq_id: logits [V] of beams that wait for their siblings' logits
    begun:  whether the first choice has been made; until then one sequence stands for all beams
    spent:  eviction counters of beams that have ended; rounded: tokens that rounding moved in them
    """

    search: BeamSearch
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    begun: bool = False
    spent: EvictionCounters = field(default_factory=EvictionCounters)
    rounded: int = 0
    peak_blocks: int = 0
    answer_blocks: int = 0

    def retire(self, seq: Sequence) -> None:
        """Add the figures of a beam that ends."""
        ended, spent = seq.account, self.spent
        spent.num_evicted += ended.num_evicted - ended.inherited_evicted
        for name in ("blocks_freed", "blocks_perfect", "compactions"):
            setattr(spent, name, getattr(spent, name) + getattr(ended, name))
        spent.num_dropped = max(spent.num_dropped, ended.num_dropped)
        self.rounded += seq.state.rounded
        self.peak_blocks = max(self.peak_blocks, seq.peak_blocks)
        self.answer_blocks = max(self.answer_blocks, seq.answer_blocks)


@dataclass(slots=True, eq=False)
class Request:
    """A prompt on its way through the engine.

    spec:      the caller's arguments
    max_len:   tokens at which every output ends, prompt included
    seed:      of its outputs' generators, the caller's or the engine's
    scores:    None for generation; otherwise the given continuation is scored and nothing is drawn
    prompt_logprobs: of the prompt tokens computed so far; None: not requested
    prompt_done: whether the whole prompt has been computed, maybe before a preemption
    features:  of the request, in their order; state: their per-request state, by type
    before_passes: features that act before passes
    beams, sparse_prefill, reuse, verify: of the state; None: no beam search, full attention, no chunks, no
               compressed cache that drafts (then compressor is None)
    bad_words: token ids of each of its params' bad_words
    refusal:   the invalid argument that ended the request; error holds its message
    parent:    the request that needs its result; None: a caller's. children: requests that it waits for
    is_plain:  full attention over all its tokens, without compression or reuse
    takes_argmax: its parameters never replace a token that is the argmax of its row
    """

    spec: RequestSpec
    compressor: Compressor | None
    max_len: int
    seed: int
    scores: Scores | None = None
    prompt_logprobs: PromptLogprobs | None = None
    sequences: list[Sequence] = field(default_factory=list)
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    arrival_s: float = field(default_factory=time.perf_counter)
    error: str | None = None
    refusal: InvalidArgumentError | None = None
    prompt_done: bool = False
    features: tuple[FeatureHooks, ...] = ()
    before_passes: tuple[FeatureHooks, ...] = ()
    state: Mapping[type, Any] = field(default_factory=dict)
    bad_words: tuple[tuple[int, ...], ...] = ()
    parent: Request | None = None
    children: list[Request] = field(default_factory=list)
    beams: Beams | None = field(init=False)
    sparse_prefill: SparsePrefill | None = field(init=False)
    reuse: Reuse | None = field(init=False)
    verify: Verify | None = field(init=False)
    is_plain: bool = field(init=False)
    takes_argmax: bool = field(init=False)

    def __post_init__(self) -> None:
        self.beams, self.reuse = self.state.get(Beams), self.state.get(Reuse)
        self.sparse_prefill, self.verify = self.state.get(SparsePrefill), self.state.get(Verify)
        special = (self.compressor, self.verify, self.sparse_prefill, self.reuse)
        self.is_plain = all(each is None for each in special)
        self.takes_argmax = not self.bad_words and SampleRow(self.params, [], [0], (), None).takes(0)

    @property
    def reader(self) -> TokenReader | None:
        """A reader for a new output; None if no feature follows outputs."""
        return next((reader for feature in self.features if (reader := feature.reader(self))), None)

    @property
    def rule(self) -> OutputRule | None:
        """A rule for a new output; None if no feature restricts outputs."""
        return next((rule for feature in self.features if (rule := feature.rule(self))), None)

    @property
    def request_id(self) -> str:
        return self.spec.request_id

    @property
    def params(self) -> SamplingParams:
        return self.spec.params

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.spec.prompt_token_ids

    @property
    def num_seats(self) -> int:
        """Most sequences that it has at a time."""
        return self.params.n if self.beams is None else self.beams.search.params.beam_width

    @property
    def shown(self) -> list[Sequence]:
        """The outputs that a caller sees. Beams are shown only at the end, because they may still change."""
        return [] if self.beams is not None and not self.finished else self.sequences

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of the prompt were requested and are incomplete."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.prompt_token_ids)

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)

    def collect_metrics(self) -> RequestMetrics:
        """Sum the sequences' figures into the request's."""
        m = self.metrics
        compressor = self.compressor if self.verify is None else self.verify.compressor
        if compressor is not None:
            config = compressor.config
            keeps_all = compressor.eviction_method.keeps_all
            m.policy, m.budget, m.sinks = config.policy, None if keeps_all else config.budget, config.sinks
        m.num_prompt_tokens = len(self.prompt_token_ids)
        m.num_generated_tokens = sum(seq.num_generated for seq in self.sequences)
        accounts = [seq.account for seq in self.sequences]
        peaks = [(seq.peak_blocks, seq.answer_blocks) for seq in self.sequences]
        m.tokens_lost_to_rounding = sum(seq.state.rounded for seq in self.sequences)
        if self.beams is not None:
            accounts.append(self.beams.spent)
            peaks.append((self.beams.peak_blocks, self.beams.answer_blocks))
            m.tokens_lost_to_rounding += self.beams.rounded
        m.tokens_evicted = sum(a.num_evicted - a.inherited_evicted for a in accounts)
        m.blocks_freed = sum(a.blocks_freed for a in accounts)
        m.blocks_perfect = sum(a.blocks_perfect for a in accounts)
        m.compactions = sum(a.compactions for a in accounts)
        m.peak_blocks = max((peak for peak, _ in peaks), default=0)
        m.answer_blocks = max((peak for _, peak in peaks), default=0)
        m.final_blocks = sum(seq.final_blocks for seq in self.sequences)
        for feature in self.features:
            feature.report(self, m)
        return replace(m, counts=dict(m.counts))

    def output(self) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.spec.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[seq.output() for seq in sorted(self.shown, key=lambda s: s.index)],
            finished=self.finished,
            metrics=self.collect_metrics(),
            error=self.error,
            prompt_reports=None if self.prompt_logprobs is None else Grown(self.prompt_logprobs),
        )

    def score_output(self) -> ScoreOutput:
        assert self.scores is not None, f"request {self.request_id} is not scored"
        return ScoreOutput(
            request_id=self.request_id,
            predicted=self.scores.predicted,
            logprobs=self.scores.logprobs,
            metrics=self.collect_metrics(),
            error=self.error,
        )


def wanted_positions(item: Scheduled) -> range:
    """Return the positions of this chunk that need logits: the last known token's, those of drafts, and those
    that predict tokens with reported log-probabilities, of the prompt or of a scored continuation."""
    seq, start = item.seq, item.row.first
    request, end, known = seq.request, start + item.row.num_tokens, len(seq.token_ids)
    if request.scores is not None:
        return range(min(end, max(start, seq.num_prompt - 1)), min(end, known - 1))
    first = end - 1 - item.row.num_drafts if end >= known else end
    if request.prompt_logprobs is not None and request.lacks_prompt_logprobs:
        first = min(first, max(start, len(request.prompt_logprobs) - 1))
    return range(first, end)
