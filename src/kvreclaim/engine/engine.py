"""The engine: requests in, one step at a time, outputs out. Single-threaded."""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass

import torch

from kvreclaim.compression import Compressor
from kvreclaim.config import EngineConfig, SamplingParams
from kvreclaim.engine.admission import Lengths, check_length, check_prompt, output_limit
from kvreclaim.engine.compression import CompressionPass
from kvreclaim.engine.detokenizer import Detokenizer
from kvreclaim.engine.due import is_due
from kvreclaim.engine.graphs import decode_graphs
from kvreclaim.engine.outputs import EngineTotals, FinishReason, StepStats
from kvreclaim.engine.request import Request, Scores, Sequence
from kvreclaim.engine.runner import ModelRunner
from kvreclaim.engine.sampler import draw
from kvreclaim.engine.scheduler import Scheduled, Scheduler
from kvreclaim.engine.signals import Signals
from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.backend import Need, choose_backend

logger = logging.getLogger(__name__)

UNSEEDED = 1 << 40
"""Seeds of requests that bring none begin here, where no caller's seed is expected."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The requests that got tokens or ended in this step, and the step's figures."""

    requests: list[Request]
    stats: StepStats


class Engine:
    """Continuous batching over a paged cache whose compression gives blocks back.

    config.num_blocks and config.max_model_len must be set (LLM derives them from the machine).
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig) -> None:
        if config.num_blocks is None or config.max_model_len is None:
            raise InvalidArgumentError("num_blocks and max_model_len are None; the engine needs both set.")
        facts = loaded.facts
        self.loaded = loaded
        self.config = config
        self.max_model_len = config.max_model_len
        self.memory = MemoryManager(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            fingerprint=f"{facts.fingerprint}/{facts.name}/{facts.dtype}",
        )
        weight = next(loaded.model.parameters())
        like = weight.new_empty(0, dtype=facts.dtype)
        need = Need(facts.layers, config.block_size, facts.dtype, facts.device)
        choice = choose_backend(config.kernels, need)
        self.kernels = f"{choice.describe()}; {loaded.modules}"
        logger.log(logging.WARNING if choice.why_not else logging.INFO, self.kernels)
        self.backend = backend = choice.backend
        self.cache = backend.allocate(facts.layers, config.num_blocks, config.block_size, like=like)
        self.signals = Signals(loaded, self.memory, self.cache, backend)
        self.scheduler = Scheduler(config, self.memory, self.signals.drop)
        self.runner = ModelRunner(loaded, self.memory, self.cache, backend, self.signals)
        self.runner.graphs = decode_graphs(loaded.model, self.cache, backend, config)
        self.compression = CompressionPass(self.memory, self.cache, backend, facts, self.signals)
        self.totals = EngineTotals()
        self.requests: dict[str, Request] = {}
        self._seq_ids = itertools.count()
        self._num_added = 0

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        compressor: Compressor | None = None,
        *,
        prompt: str | None = None,
        continuation: list[int] | None = None,
    ) -> Request:
        """Queue a request; with `continuation` its tokens are scored instead of drawing any.

        Raises: InvalidArgumentError, RequestTooLongError. A refused request leaves no trace.
        """
        if request_id in self.requests:
            raise InvalidArgumentError(f"request id {request_id!r} is in use; pass another one.")
        tokens = prompt_token_ids + (continuation or []) if prompt_token_ids else []
        lengths = Lengths(len(prompt_token_ids), len(tokens) - (continuation is not None))  # last: uncomputed
        check_prompt(tokens, params, self.config, self.loaded)
        check_length(lengths, compressor, self.config)
        self.signals.check(compressor, scored=continuation is not None)
        max_len = output_limit(lengths, params, compressor, self.config)
        unseeded = UNSEEDED + self.config.seed * 1_000_003 + self._num_added
        seed = unseeded if params.seed is None else params.seed
        request = Request(request_id, prompt, list(prompt_token_ids), params, compressor, max_len, seed)
        if continuation is not None:
            request.scores = Scores([-1] * len(continuation), [float("nan")] * len(continuation))
        seq = self._new_sequence(request, 0, list(tokens))
        seq.waits_for_fork = params.n > 1
        self.requests[request_id] = request
        self._num_added += 1
        self.scheduler.add(seq)
        return request

    def abort(self, request_id: str) -> None:
        """End a request now and return all its blocks. Raises: UnknownRequestError."""
        try:
            request = self.requests[request_id]
        except KeyError:
            raise UnknownRequestError(
                f"request {request_id!r} is unknown or has finished; {len(self.requests)} are in flight."
            ) from None
        self._end_request(request, "abort")

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> StepResult:
        """Schedule, compute, draw, compress. A request that fails ends with reason "error"; others go on."""
        started = time.perf_counter()
        step = self.scheduler.schedule()
        assert step or not self.scheduler.waiting or self.scheduler.running, (
            f"{len(self.scheduler.waiting)} sequences wait, none can run in {self.memory.stats()}"
        )
        touched = self._run(step) if step else []
        self.totals.steps += 1
        stats = StepStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_tokens=sum(item.num_tokens for item in step),
            blocks_in_use=self.memory.pool.num_in_use,
            elapsed_s=time.perf_counter() - started,
        )
        return StepResult(touched, stats)

    def _run(self, step: list[Scheduled]) -> list[Request]:
        try:
            logits, wanted = self.runner.forward(step)
        except Exception as error:
            logger.exception("forward pass of %d sequences failed", len(step))
            requests = list({id(item.seq.request): item.seq.request for item in step}.values())
            for request in requests:
                self._fail(request, error)
            return requests
        for item in step:
            self._commit(item)
        return self._take_logits(step, logits, wanted)

    def _commit(self, item: Scheduled) -> None:
        seq, start = item.seq, item.seq.num_computed
        self.memory.commit(seq.seq_id, seq.token_ids[start : start + item.num_tokens])
        seq.num_computed += item.num_tokens
        seq.note_blocks(len(self.memory.table(seq.seq_id).blocks()))
        in_prompt = max(0, min(seq.num_computed, seq.num_prompt) - start)
        self.totals.prompt_tokens += in_prompt

    def _take_logits(self, step: list[Scheduled], logits: torch.Tensor, wanted: list[range]) -> list[Request]:
        """Draw or score from each sequence's rows, then compress whoever is due."""
        touched: dict[str, Request] = {}
        draws: list[tuple[Sequence, int]] = []
        best = logits.max(-1)  # one pass: a NaN anywhere in a row is its maximum
        bad = best.values.isnan().tolist()
        row = 0
        for item, positions in zip(step, wanted, strict=True):
            seq, rows = item.seq, range(row, row + len(positions))
            row += len(positions)
            if any(bad[r] for r in rows):
                self._fail(seq.request, ValueError("the model's logits are not numbers (NaN)"))
            elif seq.request.scores is not None:
                self._score(seq, positions, logits[rows.start : rows.stop].float())
            elif rows:
                draws.append((seq, rows.start))
            if rows:
                touched[seq.request.request_id] = seq.request
        self._draw(draws, logits, best.indices.tolist())
        for item in step:
            if item.seq.finish_reason is None and is_due(item.seq, self.config.max_num_batched_tokens):
                self._compress(item.seq)
                if item.seq.finish_reason is not None:
                    touched[item.seq.request.request_id] = item.seq.request
        return list(touched.values())

    def _score(self, seq: Sequence, positions: range, logits: torch.Tensor) -> None:
        scores = seq.request.scores
        assert scores is not None, f"request {seq.request.request_id} is not scored"
        if positions:
            given = seq.token_ids[positions.start + 1 : positions.stop + 1]
            scores.record(positions.start + 1 - seq.num_prompt, given, logits)
        if seq.num_computed >= len(seq.token_ids) - 1:
            self._end_sequence(seq, "length")

    def _draw(self, draws: list[tuple[Sequence, int]], logits: torch.Tensor, best: list[int]) -> None:
        """One token for each sequence; a sequence that waits for its fork draws one for each sibling."""
        outputs: list[Sequence] = []
        rows: list[int] = []
        for seq, row in draws:
            if seq.waits_for_fork and is_due(seq, self.config.max_num_batched_tokens):
                self._compress(seq)
            if seq.finish_reason is None:
                siblings = [seq, *self._fork(seq)] if seq.waits_for_fork else [seq]
                outputs += siblings
                rows += [row] * len(siblings)
        if not outputs:
            return
        asked = [seq.sample_row(self.loaded.eos_token_ids) for seq in outputs]
        tokens, logprobs = draw(logits, best, rows, asked)
        for seq, token, report in zip(outputs, tokens, logprobs, strict=True):
            if seq.finish_reason is None:
                if report is not None:
                    seq.logprobs.append(report)
                self._take_token(seq, token)

    def _take_token(self, seq: Sequence, token: int) -> None:
        try:
            self._append(seq, token)
        except Exception as error:
            logger.exception("decoding a token of request %s failed", seq.request.request_id)
            self._fail(seq.request, error)

    def _append(self, seq: Sequence, token: int) -> None:
        request, params = seq.request, seq.request.params
        if request.metrics.ttft_s is None:
            request.metrics.ttft_s = time.perf_counter() - request.arrival_s
        seq.token_ids.append(token)
        self.totals.generation_tokens += 1
        may_stop = seq.num_generated >= params.min_tokens
        is_eos = token in self.loaded.eos_token_ids and not params.ignore_eos
        is_stop = token in (params.stop_token_ids or ())
        stop = None
        if seq.detokenizer is not None and not (may_stop and (is_eos or is_stop)):
            stop = seq.detokenizer.append(token, may_stop=may_stop)
        if may_stop and (is_eos or is_stop or stop is not None):
            seq.stop_reason = stop if stop is not None else (token if is_stop and not is_eos else None)
            self._end_sequence(seq, "stop")
        elif len(seq.token_ids) >= request.max_len:
            self._end_sequence(seq, "length")

    def _fork(self, parent: Sequence) -> list[Sequence]:
        """The siblings of a prompt that has just been computed; they share all its blocks."""
        parent.waits_for_fork = False
        request = parent.request
        children = []
        for index in range(1, request.params.n):
            child = self._new_sequence(request, index, list(parent.token_ids))
            child.num_computed = parent.num_computed
            child.state = parent.state.fork()
            self.memory.fork(parent.seq_id, child.seq_id)
            self.signals.fork(parent.seq_id, child.seq_id)
            self.scheduler.running.append(child)
            children.append(child)
        return children

    def _new_sequence(self, request: Request, index: int, token_ids: list[int]) -> Sequence:
        params, tokenizer = request.params, self.loaded.tokenizer
        generator = None
        if params.temperature > 0:
            generator = torch.Generator().manual_seed((request.seed * 65_537 + index) % 2**63)
        detokenizer = Detokenizer(tokenizer, params.stop_strings) if tokenizer is not None else None
        seq = Sequence(next(self._seq_ids), request, index, token_ids, generator, detokenizer)
        request.sequences.append(seq)
        return seq

    def _compress(self, seq: Sequence) -> None:
        try:
            with torch.inference_mode():
                self.compression.run(seq, self.totals)
        except Exception as error:
            logger.exception("compressing request %s failed", seq.request.request_id)
            self._fail(seq.request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        request.error = f"{type(error).__name__}: {error}"
        self._end_request(request, "error")

    def _end_request(self, request: Request, reason: FinishReason) -> None:
        for seq in request.sequences:
            if seq.finish_reason is None:
                self._end_sequence(seq, reason)

    def _end_sequence(self, seq: Sequence, reason: FinishReason) -> None:
        """Return its blocks; the request leaves with its last sequence."""
        seq.finish_reason = reason
        if seq.detokenizer is not None and reason != "error":
            seq.detokenizer.finish()
        self.scheduler.remove(seq)
        self.totals.finished[reason] = self.totals.finished.get(reason, 0) + 1
        if seq.request.finished:
            seq.request.metrics.e2e_s = time.perf_counter() - seq.request.arrival_s
            self.requests.pop(seq.request.request_id, None)
