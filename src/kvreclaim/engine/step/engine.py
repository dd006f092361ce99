"""The engine: requests in, one step at a time, outputs out. Single-threaded."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import StatsSource
from kvreclaim.config import EngineConfig
from kvreclaim.engine.compact.pass_context import PassContext
from kvreclaim.engine.compact.passes import CompressionPass
from kvreclaim.engine.extension import Extensions
from kvreclaim.engine.feature import RequestFeature, take_options
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.offload.compressed_session import CompressedSessions
from kvreclaim.engine.offload.disk import namespace_of
from kvreclaim.engine.offload.session import Sessions
from kvreclaim.engine.offload.snapshot_state import SnapshotStore
from kvreclaim.engine.offload.states import StateCopies
from kvreclaim.engine.offload.stats import TierStats
from kvreclaim.engine.request.outputs import EngineTotals, StepStats
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.spec import RequestSpec, footprint_of
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.engine.speculative.draft_model import make_drafter
from kvreclaim.engine.speculative.load import DraftModel
from kvreclaim.engine.step.assembly import (
    admitting,
    chosen_backend,
    describe,
    keeps_snapshots_on_disk,
    make_host_states,
    make_offload,
    make_runner,
    make_scheduler,
    make_snapshots,
    make_states,
    make_storage,
    stored_facts,
)
from kvreclaim.engine.step.executor import StepExecutor
from kvreclaim.engine.step.output_processor import OutputProcessor
from kvreclaim.engine.step.request_factory import RequestFactory, bounded_by_pool, engine_features
from kvreclaim.errors import InvalidArgumentError, UnknownRequestError
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.groups import layer_groups
from kvreclaim.ops.native import torch_alone
from kvreclaim.refusals import Feature, refuse
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.schedule import Pass
from kvreclaim.schedule.preemption_cost import PreemptionCostModel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The requests that got tokens or ended in this step, its figures, and its passes in their order."""

    requests: list[Request]
    stats: StepStats
    passes: list[tuple[Request, Pass[int]]]


P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=RequestFeature)


def on_own_device(method: Callable[Concatenate[Engine, P], R]) -> Callable[Concatenate[Engine, P], R]:
    """Run a method with the engine's device as the current one: Triton launches there."""

    @wraps(method)
    def run(self: Engine, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.on_device():
            return method(self, *args, **kwargs)

    return run


class Engine:
    """Continuous batching over a paged cache. Compression frees its blocks.

    config.num_blocks and config.max_model_len must be set (LLM derives them from the machine).
    features: classes of the features that requests may have (engine/features/)
    draft: the model that config.speculative_config names, if any
    stats: statistics of the model for the key transform of a coded cache; None: computed from the weights

    max_model_len: up to which every request without a compression of its own is served (`bound`)
    longest:       that any request may have
    """

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        features: Iterable[Callable[[Engine], RequestFeature]],
        draft: DraftModel | None = None,
        stats: StatsSource | None = None,
    ) -> None:
        if config.num_blocks is None or config.max_model_len is None:
            raise InvalidArgumentError("num_blocks and max_model_len are None; the engine needs both set.")
        self.loaded, self.config, device = loaded, config, loaded.facts.device
        self.on_device: Callable[[], AbstractContextManager[Any]] = nullcontext
        if device.type == "cuda":
            self.on_device = partial(torch.cuda.device, device)
        self.max_model_len = self.longest = config.max_model_len
        facts, form = stored_facts(loaded, config, stats)
        self.kv_format = form
        self.groups = groups = layer_groups(facts, config)
        self.features = engine_features(config, loaded, form, groups)
        refuse(self.features)
        choice = chosen_backend(config, loaded, groups, form)
        self.backend = backend = choice.backend
        self.totals = totals = EngineTotals()
        self.extensions = Extensions()
        # Features may refuse a setting, so they are made before storage is allocated.
        on = tuple(make(self) for make in features)
        self.storage = storage = make_storage(loaded, config, groups, form, backend, totals)
        self.memory, self.cache, self.device_cache = storage.memory, storage.cache, storage.device
        self.limits = admitting(config, self.memory.pool.num_blocks)
        self.states = states = make_states(loaded, self.memory)
        self.signals = Signals(
            loaded,
            groups,
            self.device_cache or self.cache,
            backend,
            config.max_signal_bytes,
            None if states is None else states.behind,
        )
        preemption = PreemptionCostModel(config.preemption_mode, rates=storage.rates)
        self.tiers = make_offload(storage, self.signals, preemption, totals)
        scheduler = make_scheduler(config, self.memory, preemption)
        self.lifecycle = Lifecycle(loaded, self.memory, self.signals, scheduler, self.extensions, totals)
        self.scheduler, self.requests = scheduler, self.lifecycle.requests
        if states is not None:
            self.extensions.add(states)
        self._on_host = make_host_states(storage, states, self.tiers)
        if self._on_host is not None:
            self.extensions.add(self._on_host)
        if self.tiers is not None:
            self.extensions.add(self.tiers)
            if keeps_snapshots_on_disk(config, storage, scheduler):
                _ = self.snapshots  # those of an earlier run are found
        self.runner = make_runner(loaded, config, groups, storage, backend, self.signals, self.extensions)
        context = PassContext(self.memory, self.cache, backend, groups.facts, self.signals)
        self.compression = CompressionPass(context, totals)
        self.output_processor = OutputProcessor(self.lifecycle, self.compression)
        self.executor = StepExecutor(self.runner, self.lifecycle, self.output_processor)
        self.drafter = make_drafter(config, loaded, draft)
        if self.drafter is not None:
            self.extensions.add(self.drafter)
        self.kernels = describe(loaded, groups, form, choice, self.extensions)
        logger.log(logging.WARNING if choice.why_not else logging.INFO, self.kernels)
        self.factory = RequestFactory(loaded, self.limits, groups, self.features, self.signals, on)
        self._num_added = 0

    @cached_property
    def snapshots(self) -> SnapshotStore:
        """Keeps compressed prefixes. Created for the first request with one."""
        return self.extensions.add(
            make_snapshots(self.config, self.storage, self.lifecycle, self.tiers, self._state_copies)
        )

    @property
    def _state_copies(self) -> StateCopies | None:
        if self.states is None:
            return None
        return StateCopies(self.states.group, self.states.store, self.memory.offload.parking, self._on_host)

    def feature(self, kind: type[F]) -> F:
        """The engine's object of a feature of requests."""
        return next(each for each in self.factory.features if isinstance(each, kind))

    @on_own_device
    def bound(self, compressor: Compressor | None, requested: int | None) -> None:
        """Lower max_model_len to the tokens that the pool holds of a sequence under the default compression.
        requested: max_model_len as the caller passed it

        Raises: InvalidArgumentError if the pool cannot hold `requested` tokens, or not a single one.
        """
        own = None if compressor is None or compressor.config.verify else compressor
        footprint = footprint_of(own, self.config, [], self.groups)
        longest = self.loaded.facts.max_position
        self.max_model_len = bounded_by_pool(footprint, self.limits, given=requested, longest=longest)
        self.runner.expect(compressor)

    def tier_stats(self) -> TierStats | None:
        """Statistics of host and disk; None without host slots."""
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
        return Sessions(
            self.memory,
            self.cache,
            self.backend,
            self.tiers,
            namespace.fields,
            compressed,
            snapshots.states,
        )

    @on_own_device
    def reset_prefix_cache(self, *, external: bool = True) -> None:
        """Forget every prefix, compressed ones included; running sequences keep their blocks. external: also
        those of host and disk. The files are deleted soon (`tiers.is_clearing`)."""
        self.scheduler.snapshots.clear()
        if self.tiers is None:
            self.memory.reset_prefix_cache()
        else:
            self.tiers.reset_prefixes(external=external)

    @on_own_device
    def close(self) -> None:
        """Finish writes to disk and release the file. Call it when all requests have ended."""
        for extension in self.extensions.ordered:
            extension.close()

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        compressor: Compressor | None = None,
        options: Iterable[object] = (),
        **given: Any,
    ) -> Request:
        """Add a RequestSpec. given: its other fields, and fields of further options by name"""
        more = take_options(map(type, self.factory.features), given)
        spec = RequestSpec(
            request_id=request_id,
            prompt_token_ids=list(prompt_token_ids),
            params=params,
            options={type(each): each for each in options} | more,
            **given,
        )
        return self.add(spec, compressor)

    @on_own_device
    def add(
        self, spec: RequestSpec, compressor: Compressor | None = None, *, parent: Request | None = None
    ) -> Request:
        """Queue a request.

        compressor: made from spec.compression
        parent:     the request that needs the result of this one

        Raises: InvalidArgumentError, RequestTooLongError. A refused request leaves no trace.
        """
        if spec.request_id in self.requests:
            raise InvalidArgumentError(f"request id {spec.request_id!r} is in use; pass another one.")
        made = self.factory.make(spec, compressor, self._num_added, parent)
        self.runner.expect(compressor)
        self.lifecycle.begin(made.request, made.tokens, made.footprint, queued=made.queued)
        for extension in self.extensions.ordered:
            extension.added()
        self._num_added += 1
        return made.request

    @on_own_device
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

    @on_own_device
    def step(self) -> StepResult:
        """Schedule, compute, draw, compress. A request that fails ends with reason "error"; others go on."""
        started, touched = time.perf_counter(), self.lifecycle.touched
        touched.clear()
        prompts_done = self.totals.prompts_done
        for extension in self.extensions.ordered:
            extension.begin_step()
        plan = self.scheduler.schedule()
        step = self.lifecycle.follow(plan)
        rests = not (step or touched or plan.preempted or plan.admitted or self.scheduler.running)
        if rests and self.scheduler.waiting and not any(each.idle() for each in self.extensions.ordered):
            stuck = AssertionError(f"it fits into no empty pool, but was let in: {self.memory.stats()}")
            self.lifecycle.fail(next(iter(self.scheduler.waiting)).request, stuck, "admitting")
        num_tokens = num_decode = 0
        for item in step:
            row = item.row
            num_tokens += row.num_tokens
            if row.num_tokens - row.num_drafts == 1 and row.first >= item.seq.num_prompt:
                num_decode += row.num_tokens  # its newest token, and drafts behind it
            metrics = item.seq.request.metrics
            if metrics.queue_s is None:
                metrics.queue_s = started - item.seq.request.arrival_s
        with torch_alone() if num_decode == num_tokens else nullcontext():
            checked = self.executor.compute(plan, step)
        self.executor.commit(plan, checked)
        for extension in self.extensions.ordered:
            extension.computed([] if checked is None else checked.sequences)
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
