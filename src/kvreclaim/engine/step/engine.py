"""The engine: requests in, one step at a time, outputs out. Single-threaded."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from kvreclaim.beams import BeamSearchParams
from kvreclaim.compatibility import Feature, refuse
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.prefill.method import SparsePrefill
from kvreclaim.compression.prefill.registry import make_method
from kvreclaim.config import DENSE, EngineConfig
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.compact.passes import CompressionPass
from kvreclaim.engine.compact.recall_refresh import RecallExtension
from kvreclaim.engine.execute.graphs import decode_graphs
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.extension import Extensions
from kvreclaim.engine.lifecycle.chunk_requests import ChunkedPrompts
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle, make_scheduler
from kvreclaim.engine.offload.compressed_session import CompressedSessions
from kvreclaim.engine.offload.disk import namespace_of, share_bytes
from kvreclaim.engine.offload.session import Sessions
from kvreclaim.engine.offload.snapshot_state import SnapshotStore
from kvreclaim.engine.offload.stats import TierStats
from kvreclaim.engine.request.chunk_reuse import Reuse
from kvreclaim.engine.request.footprints import footprint_of
from kvreclaim.engine.request.outputs import EngineTotals, StepStats
from kvreclaim.engine.request.request import Beams, Request, Scheduled, Scores, Verify
from kvreclaim.engine.request.request import Sequence as Seq
from kvreclaim.engine.request.sizing import max_open_snapshots
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.sampling.beam_search import BeamSearch
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.speculative.companion_copier import CompanionCache, CompanionCopier
from kvreclaim.engine.speculative.companion_tracker import CompanionTracker
from kvreclaim.engine.speculative.load import DraftModel
from kvreclaim.engine.speculative.make import make_drafter
from kvreclaim.engine.speculative.verifier import Verifier
from kvreclaim.engine.step.assembly import (
    chosen_backend,
    default_prefill,
    keep_on_disk,
    make_offload,
    make_recalls,
    make_snapshots,
    make_storage,
    private_runner,
)
from kvreclaim.engine.step.features import compression_features, engine_features, request_features
from kvreclaim.engine.step.full_cache import admitting
from kvreclaim.engine.step.lengths import bounded_by_pool, check_length, output_limit
from kvreclaim.engine.step.output_processor import CheckedLogits, OutputProcessor
from kvreclaim.engine.step.validation import (
    check_beams,
    check_priority,
    check_prompt,
    check_recall,
    check_salt,
    check_sparse_prefill,
    checked_bad_words,
)
from kvreclaim.engine.step.verified import divided, verify_of
from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.formats import kv_format, plain_format
from kvreclaim.ops.groups import layer_groups
from kvreclaim.ops.native import torch_alone
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule import Footprint, Pass, StepDone, StepPlan
from kvreclaim.schedule.companions import Companions
from kvreclaim.schedule.preemption_cost import PreemptionCostModel

logger = logging.getLogger(__name__)

UNSEEDED = 1 << 40
"""Seeds of requests that bring none begin here, where no caller's seed is expected."""


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The requests that got tokens or ended in this step, its figures, and its passes in their order."""

    requests: list[Request]
    stats: StepStats
    passes: list[tuple[Request, Pass[int]]]


class Engine:
    """Continuous batching over a paged cache whose compression gives blocks back.

    config.num_blocks and config.max_model_len must be set (LLM derives them from the machine).
    draft: the model that config.speculative_config names, if it names one

    max_model_len: up to which every request without a compression of its own is served (`bound`)
    longest:       that any request may have
    """

    def __init__(self, loaded: LoadedModel, config: EngineConfig, draft: DraftModel | None = None) -> None:
        if config.num_blocks is None or config.max_model_len is None:
            raise InvalidArgumentError("num_blocks and max_model_len are None; the engine needs both set.")
        self.loaded, self.config = loaded, config
        self.max_model_len = self.longest = config.max_model_len
        self.groups = groups = layer_groups(loaded.facts, config)
        self._sparse_prefill = default_prefill(config, groups)
        self.kv_format = form = kv_format(config.kv_cache_dtype, groups.facts.dtype)
        self.features = engine_features(config, form, groups)
        sparse = self._sparse_prefill
        refuse(self.features | ({Feature.SPARSE_PREFILL: sparse.name} if sparse is not None else {}))
        choice = chosen_backend(config, groups, form)
        self.backend = backend = choice.backend
        self.totals = totals = EngineTotals()
        self.extensions = Extensions()
        storage = make_storage(loaded, config, groups, form, backend, totals)
        self.memory, self.cache, self.device_cache = storage.memory, storage.cache, storage.device
        self._admitting = admitting(config, self.memory.pool.num_blocks)
        self.signals = Signals(
            loaded, groups, self.device_cache or self.cache, backend, config.max_signal_bytes
        )
        preemption = PreemptionCostModel(config.preemption_mode, rates=storage.rates)
        self.tiers = make_offload(storage, self.signals, preemption, totals)
        scheduler = make_scheduler(config, self.memory, preemption, max_open_snapshots(config, form))
        self.lifecycle = Lifecycle(loaded, self.memory, self.signals, scheduler, self.extensions, totals)
        self.scheduler, self.requests = scheduler, self.lifecycle.requests
        if self.tiers is not None:
            self.extensions.add(self.tiers)
            if storage.file is not None and share_bytes(config) and scheduler.snapshots.max_blocks:
                keep_on_disk(self.snapshots, config, self.tiers, storage.file.namespace)
        graphs = None if storage.stream else decode_graphs(loaded.model, self.cache, backend, config)
        self.runner = ModelRunner(
            loaded,
            groups,
            self.memory,
            self.cache,
            backend,
            self.signals,
            storage.stream,
            graphs=graphs,
            extensions=self.extensions,
        )
        self.recalls = make_recalls(config, self.cache, backend, groups, totals)
        if self.recalls is not None:
            self.extensions.add(RecallExtension(self.recalls, self.memory, self.signals))
        context = PassContext(self.memory, self.cache, backend, groups.facts, self.signals)
        self.compression = CompressionPass(context, totals, self.recalls)
        self.output_processor = OutputProcessor(self.lifecycle, self.compression)
        self.drafter = make_drafter(config, self.memory, form, loaded, draft)
        if self.drafter is not None:
            self.extensions.add(self.drafter)
        windows = "" if groups.parts == 1 else f", windows {plain_format(loaded.facts.dtype).name}"
        kernels = [f"{choice.describe()}; {loaded.modules}; KV {form.name}{windows}"]
        kernels += [each.describe() for each in self.extensions.ordered]
        self.kernels = "; ".join(filter(None, kernels))
        logger.log(logging.WARNING if choice.why_not else logging.INFO, self.kernels)
        self._num_added = 0

    @cached_property
    def snapshots(self) -> SnapshotStore:
        """Keeps compressed prefixes, from the first request on that asks for one."""
        return self.extensions.add(make_snapshots(self.lifecycle, self.tiers))

    @cached_property
    def chunked(self) -> ChunkedPrompts:
        """Reuses chunks of prompts, from the first request on that has some."""
        facts = self.groups.facts
        chunked = ChunkedPrompts(
            self.loaded, facts, self.cache, self.backend, self.lifecycle, self._add_child
        )
        return self.extensions.add(chunked)

    @cached_property
    def verifier(self) -> Verifier:
        """Drafts from compressed caches, from the first request on that asks for it. Its companions share the
        pool with everybody, or have it for themselves, where full caches lie in host memory."""
        runner, compression = self.runner, self.compression
        if self.device_cache is not None:
            runner, compression = private_runner(
                self.loaded,
                self.config,
                self.groups,
                self.device_cache,
                self.backend,
                self.signals,
                self.totals,
            )
        companions: Companions[Seq] = Companions(runner.memory)
        self.scheduler.take_in(companions)
        full = CompanionCache(self.memory, self.runner.layers, self.runner.stream)
        feeding = CompanionCopier(
            full, CompanionCache(runner.memory, runner.layers), self.backend, self.signals
        )
        following = CompanionTracker(self.lifecycle, runner, compression, companions, feeding)
        return self.extensions.add(Verifier(self.lifecycle, following))

    def bound(self, compressor: Compressor | None, said: int | None) -> None:
        """Lower max_model_len to what the pool holds of every sequence under this compression, which requests
        have that bring none. said: max_model_len as the caller gave it

        Raises: InvalidArgumentError if the pool cannot hold what was said, or not a single token.
        """
        footprint = footprint_of(divided(compressor)[1], self.config, [], groups=self.groups)
        longest = self.loaded.facts.max_position
        self.max_model_len = bounded_by_pool(footprint, self._admitting, said=said, longest=longest)

    def cold_bytes(self) -> int:
        """Host memory that evicted tokens take, of all sequences."""
        return 0 if self.recalls is None else self.recalls.pool.bytes_in_use

    def tier_stats(self) -> TierStats | None:
        """What lies below the pool; None without host slots."""
        return None if self.tiers is None else self.tiers.stats()

    @cached_property
    def sessions(self) -> Sessions:
        """Saves and restores what is cached. The first time all weights are read, for a digest of them.

        Raises: InvalidArgumentError where layers have tables of their own, or the cache lies in host memory.
        """
        refuse(self.features | {Feature.SESSION: ""})
        namespace = namespace_of(self.config, self.loaded, self.kv_format, self.backend.NAME)
        snapshots, config = self.snapshots, self.config
        compressed = CompressedSessions(snapshots, self.memory, self.cache, self.backend, self.tiers, config)
        return Sessions(self.memory, self.cache, self.backend, self.tiers, namespace.fields, compressed)

    def reset_prefix_cache(self, *, external: bool = True) -> None:
        """Forget every prefix, compressed ones included; running sequences keep their blocks. external: also
        what host and disk have, on disk soon (`tiers.is_clearing`) and for good."""
        self.scheduler.snapshots.clear()
        if self.tiers is None:
            self.memory.reset_prefix_cache()
        else:
            self.tiers.reset_prefixes(external=external)

    def close(self) -> None:
        """Write what is on its way to disk and let go of the file; to be called when all has ended."""
        for extension in self.extensions.ordered:
            extension.close()

    def block_holders(self) -> dict[int, tuple[str, ...]]:
        """Block to the requests whose running sequences hold it, a request once for each of them."""
        found: dict[int, list[str]] = {}
        for seq in self.scheduler.running:
            for block in self.memory.blocks(seq.seq_id):
                found.setdefault(block, []).append(seq.request.request_id)
        return {block: tuple(names) for block, names in found.items()}

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        compressor: Compressor | None = None,
        **options: Any,
    ) -> Request:
        """`add` of a RequestSpec with these options."""
        spec = RequestSpec(
            request_id=request_id, prompt_token_ids=list(prompt_token_ids), params=params, **options
        )
        return self.add(spec, compressor)

    def add(
        self,
        spec: RequestSpec,
        compressor: Compressor | None = None,
        *,
        parent: Request | None = None,
        trial: Reuse | None = None,
    ) -> Request:
        """Queue a request.

        compressor: what spec.compression stands for
        parent:     on whose behalf a chunk is computed, or a prompt whose reuse is only tried: `trial`

        Raises: InvalidArgumentError, RequestTooLongError. A refused request leaves no trace.
        """
        config, params, prompt, chunks = self.config, spec.params, spec.prompt_token_ids, spec.chunks
        scored = spec.continuation is not None
        tokens = prompt + (spec.continuation or []) if prompt else []
        lengths = len(prompt), len(tokens) - scored  # last: uncomputed
        if spec.request_id in self.requests:
            raise InvalidArgumentError(f"request id {spec.request_id!r} is in use; pass another one.")
        check_prompt(tokens, params, config, self.loaded)
        bad_words = checked_bad_words(params, self.loaded)
        check_salt(spec.cache_salt)
        check_priority(spec.priority, config)
        method = self._prefill_method(spec)
        if asked := request_features(spec, compressor, method):
            refuse(self.features | asked)
        sparse = None
        if method is not None:
            sparse = check_sparse_prefill(method, config, self.groups.facts)
            method = None if sparse is None else method
        verified, compressor = (None, None) if compressor is None else divided(compressor)
        verify = None if verified is None else self._verify(spec, verified, len(tokens))
        footprint = footprint_of(compressor, config, prompt, spec.compress_prompt_at, self.groups, sparse)
        reuse = trial if chunks is None else self._reuse(spec)
        if reuse is not None:
            footprint = replace(footprint, shareable_until=reuse.sources[0].start)
        policy = "full" if compressor is None else compressor.policy.name
        check_length(*lengths, footprint, self._admitting, policy=policy)
        if compressor is not None:
            self.signals.check(compressor)
            check_recall(compressor, config, self.recalls)
        max_len = output_limit(
            *lengths, params.max_tokens, footprint, self._admitting, may_end_early=spec.may_end_early
        )
        beams = None if spec.beams is None else self._beams(spec.beams, prompt, max_len, footprint)
        if footprint.compress_prompt_at:
            _ = self.snapshots  # from now on
        unseeded = UNSEEDED + config.seed * 1_000_003 + self._num_added
        request = Request(
            spec,
            compressor,
            max_len,
            unseeded if params.seed is None else params.seed,
            beams=beams,
            sparse_prefill=method,
            reuse=reuse,
            verify=verify,
            bad_words=bad_words,
            parent=parent,
        )
        if spec.continuation is not None:
            count = len(spec.continuation)
            request.scores = Scores([-1] * count, [float("nan")] * count)
        elif params.prompt_logprobs is not None:
            request.prompt_logprobs = [None]
        is_chunked = chunks is not None and reuse is not None
        max_prefix_hit = None if verify is None else self.verifier.max_prefix_hit(verify)
        self.lifecycle.begin(
            request, list(tokens), footprint, queued=not is_chunked, max_prefix_hit=max_prefix_hit
        )
        if chunks is not None and is_chunked:
            self.chunked.begin(request, chunks.reuse)
        for extension in self.extensions.ordered:
            extension.added()
        self._num_added += 1
        return request

    def _prefill_method(self, spec: RequestSpec) -> SparsePrefill | None:
        """How the prompt is computed: as the request says, or the engine."""
        said = self._sparse_prefill if spec.sparse_prefill is None else spec.sparse_prefill
        return make_method(said) if isinstance(said, str) else said

    def check_compression(self, compressor: Compressor, *, scored: bool) -> None:
        """Raise InvalidArgumentError where this engine cannot serve the compression. scored: its text is
        given whole"""
        refuse(self.features | compression_features(compressor, scored=scored))
        self.signals.check(compressor)

    def _verify(self, spec: RequestSpec, verified: Compressor, num_tokens: int) -> Verify:
        """How a compressed cache drafts for the request. Raises: InvalidArgumentError."""
        most = num_tokens + (spec.params.max_tokens or 0)
        verify = verify_of(verified, self.groups, self.config, spec.prompt_token_ids, most)
        self.signals.check(verified)
        return verify

    def _reuse(self, spec: RequestSpec) -> Reuse | None:
        """What of the prompt's chunks is reused; None: nothing. Raises: RequestTooLongError."""
        chunks, prompt = spec.chunks, spec.prompt_token_ids
        assert chunks is not None, f"request {spec.request_id} has no chunks"
        reuse = self.chunked.reuse_of(list(prompt), chunks, spec.cache_salt)
        if reuse is not None and chunks.reuse.tries:
            whole = footprint_of(None, self.config, prompt, None, self.groups)
            check_length(len(prompt), len(prompt), whole, self._admitting, policy="full")
        return reuse

    def _beams(
        self, params: BeamSearchParams, prompt: list[int], max_len: int, footprint: Footprint
    ) -> Beams:
        """The request's beam search. Raises: InvalidArgumentError, RequestTooLongError."""
        eos = frozenset() if params.ignore_eos else self.loaded.eos_token_ids
        search = BeamSearch(params, max_len - len(prompt), eos)
        check_beams(search, len(prompt), footprint, self._admitting, self.loaded.vocab_size)
        return Beams(search)

    def _add_child(
        self, name: str, tokens: list[int], params: SamplingParams, parent: Request, trial: Reuse | None
    ) -> Request:
        """Queue what a request waits for, as urgently as that, for the same tenant."""
        spec = replace(
            RequestSpec(request_id=name, prompt_token_ids=tokens, params=params),
            priority=parent.spec.priority,
            tenant=parent.spec.tenant,
            cache_salt=parent.spec.cache_salt,
            sparse_prefill=DENSE,
        )
        child = self.add(spec, parent=parent, trial=trial)
        parent.children.append(child)
        return child

    def abort(self, request_id: str) -> None:
        """End a request now and return all its blocks. Raises: UnknownRequestError."""
        try:
            request = self.requests[request_id]
        except KeyError:
            raise UnknownRequestError(
                f"request {request_id!r} is unknown or has finished; {len(self.requests)} are in flight."
            ) from None
        self.lifecycle.end_request(request, "abort")

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    def step(self) -> StepResult:
        """Schedule, compute, draw, compress. A request that fails ends with reason "error"; others go on."""
        started, touched = time.perf_counter(), self.lifecycle.touched
        touched.clear()
        prompts_done = self.totals.prompts_done
        for extension in self.extensions.ordered:
            extension.begin_step()
        plan = self.scheduler.schedule()
        step = self.lifecycle.follow(plan)
        rests = not (step or touched or plan.preempted or self.scheduler.running)
        if rests and self.scheduler.waiting and not any(each.idle() for each in self.extensions.ordered):
            stuck = AssertionError(f"it fits into no empty pool, but was let in: {self.memory.stats()}")
            self.lifecycle.fail(next(iter(self.scheduler.waiting)).request, stuck, "admitting")
        num_tokens = sum(item.num_tokens for item in step)
        decodes = [item for item in step if _is_decode(item)]
        num_decode = sum(item.num_tokens for item in decodes)
        for item in step:
            metrics = item.seq.request.metrics
            if metrics.queue_s is None:
                metrics.queue_s = started - item.seq.request.arrival_s
        with torch_alone() if len(decodes) == len(step) else nullcontext():
            checked = self._compute(plan, step)
        computed = tuple(item.seq.seq_id for item, _, _ in checked.sound) if checked is not None else ()
        stand = self.output_processor.accept_drafts(checked) if checked is not None else {}
        for seq_id, error in self.scheduler.done(plan, StepDone(computed, stand=stand)):
            if seq_id in self.lifecycle.sequences:
                self.lifecycle.fail(self.lifecycle.sequences[seq_id].request, error, "committing")
        if stand:
            self._record(stand)
        sound = [] if checked is None else [item.seq for item, _, _ in checked.sound]
        if checked is not None:
            begun = {one.seq_id for one in plan.admitted}
            for item, _, _ in checked.sound:
                with self.lifecycle.contained(item.seq.request, "committing"):
                    self._note_computed(item, has_begun=item.seq.seq_id in begun)
        for extension in self.extensions.ordered:
            extension.computed(sound)
        if checked is not None:
            self.output_processor.process(checked)
        for extension in self.extensions.ordered:
            extension.propose(self.scheduler.running)
        self.totals.steps += 1
        stats = StepStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            num_tokens=num_tokens,
            num_prefill_tokens=num_tokens - num_decode,
            num_decode_tokens=num_decode,
            num_prompts_done=self.totals.prompts_done - prompts_done,
            blocks_in_use=self.memory.pool.num_in_use,
            elapsed_s=time.perf_counter() - started,
        )
        for extension in self.extensions.ordered:
            extension.end_step(stats)
        return StepResult(list(touched.values()), stats, self.output_processor.take_passes())

    def _compute(self, plan: StepPlan, step: list[Scheduled]) -> CheckedLogits | None:
        """The step's logits, checked at; None if nobody has any.

        Blocks are prepared once, in steps without rows, too: who gave way may leave blocks to be moved. If
        that fails nobody knows what they hold, and all that would write end.
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
            logits, wanted = self.runner.forward(step)
        except Exception as error:
            if len(step) == 1 and not step[0].row.num_drafts:
                self.lifecycle.fail(step[0].seq.request, error, "computing")
                return None
            logger.exception("a forward pass of %d sequences failed; running each alone", len(step))
            step, logits, wanted = self._forward_each([item.without_drafts() for item in step])
        return self.output_processor.check_logits(step, logits, wanted) if step else None

    def _forward_each(self, step: list[Scheduled]) -> tuple[list[Scheduled], torch.Tensor, list[range]]:
        """Find out whose fault it is: nothing has been committed, so every sequence can be tried once more,
        without its drafts, which may be to blame.

        Returns: those that can be computed, and what forward would have returned for them.
        """
        done: list[Scheduled] = []
        rows: list[torch.Tensor] = []
        wanted: list[range] = []
        for item in step:
            if item.seq.finish_reason is None:
                with self.lifecycle.contained(item.seq.request, "computing"):
                    logits, positions = self.runner.forward([item])
                    done.append(item)
                    rows.append(logits.clone())  # CUDA graphs write into the same place again
                    wanted += positions
        return done, torch.cat(rows) if rows else torch.empty(0), wanted

    def _record(self, stand: dict[int, int]) -> None:
        """What policies ask to be kept of rows with drafts, now that it is known which of them stand."""
        stand = {seq_id: count for seq_id, count in stand.items() if seq_id in self.lifecycle.sequences}
        try:
            self.runner.record(stand)
        except Exception as error:
            for seq_id in stand:
                self.lifecycle.fail(self.lifecycle.sequences[seq_id].request, error, "recording signals of")

    def _note_computed(self, item: Scheduled, *, has_begun: bool) -> None:
        """Figures of a sequence whose tokens have just been committed. Its prompt is pinned when it is there,
        and anew when it is there again. has_begun: in this step, maybe with all of its prompt."""
        seq, request = item.seq, item.seq.request
        if seq.finish_reason is not None:
            return
        table = self.memory.table(seq.seq_id)
        seq.note_blocks(self.memory.num_blocks(seq.seq_id))
        self.totals.prompt_tokens += max(0, min(seq.num_computed, seq.num_prompt) - item.row.first)
        if seq.num_computed < seq.num_prompt:
            return
        if not request.prompt_done:
            request.prompt_done = True
            self.totals.prompts_done += 1
            request.metrics.num_indexed_tokens = min(self.memory.indexed_len(seq.seq_id), seq.num_prompt)
            request.metrics.num_repeated_tokens = table.repeated_len
        if request.spec.retention and (has_begun or item.row.first < seq.num_prompt):
            self.memory.pin(seq.seq_id, request.spec.retention, request.spec.tenant)


def _is_decode(item: Scheduled) -> bool:
    """Whether its newest token is all that a sequence computes, and drafts behind it."""
    return item.num_known == 1 and item.row.first >= item.seq.num_prompt
