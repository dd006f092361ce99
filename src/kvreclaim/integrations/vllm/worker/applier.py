"""A worker's passes before a step: choose the survivors, move them, update the block tables."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor, PassQuestion, SignalSource
from kvreclaim.compression.config import MAX_KEPT, CompressionConfig
from kvreclaim.compression.head_views import HeadsQuestion
from kvreclaim.compression.policy import NO_SIGNALS, Signal
from kvreclaim.compression.select import NanCheck
from kvreclaim.compression.stats import LayerStats
from kvreclaim.compression.uneven import UnevenChoice, choose_uneven
from kvreclaim.integrations.vllm.scheduler.passes import StepMessage
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.cells.passes import UnevenPasses
from kvreclaim.integrations.vllm.worker.cells.positions import PassTrace, Positions, as_heads
from kvreclaim.integrations.vllm.worker.clocks import DeviceClock, HostClock, PassClock
from kvreclaim.integrations.vllm.worker.layer_signals import KeptSignals
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.integrations.vllm.worker.staging import BLOCK_SIZE, Stage, staged_layer
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops import reference
from kvreclaim.ops.backend import Backend, Need, choose_backend
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.formats import plain_format
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.schedule.budget.compaction import Pass
from kvreclaim.schedule.budget.protection import kept_prompt_slots

logger = logging.getLogger("vllm.kvreclaim")

Choice = UnevenChoice | Tensor
"""What a pass keeps: of heads with unequal numbers, or slots as choose_all returns them."""


class RunnerRows(Protocol):
    """A runner's block tables, and each request's shift: position minus slot."""

    @property
    def num_shifted(self) -> int:
        """Requests with a shift other than 0."""
        ...

    def rewrite(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        """Replace the request's block table and its shift, position minus slot."""
        ...

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests that have ended or start anew; unknown ones are ignored."""
        ...


@dataclass(slots=True)
class WorkerFigures:
    """Totals of this worker since the start. seconds: of finished passes."""

    tokens_evicted: int = 0
    compactions: int = 0
    seconds: float = 0.0


class Applier:
    """Carries out the scheduler's passes on this worker's shard of the cache.

    Args:
        options: of the engine
        facts:   of this worker's heads
        stats:   of these heads' queries, on the device; None if there are none
        views:   the caches of all layers
        rows:    the runner's block tables
        heads:   tables of requests with unequal heads; None: heads keep equally many tokens, by the same
                 ranking
        max_tokens: live tokens of passes that choose together; one alone may have more

    signals: of hooks on the layers, for policies that need them
    """

    signals: KeptSignals | None = None

    def __init__(
        self,
        options: Options,
        facts: ModelFacts,
        stats: tuple[LayerStats, ...] | None,
        views: CacheViews,
        rows: RunnerRows,
        heads: HeadTables | None = None,
        max_tokens: int = 0,
    ) -> None:
        self.options, self.facts, self.stats = options, facts, stats
        self.views, self.rows = views, rows
        self.kernels = _kernels(facts)
        self.stage = _stage(self.kernels, facts.layers[0], views)
        head_stage = _stage(self.kernels, facts.layers[0].kv_head(0), views)
        scores = None if self.signals is None else self.signals.scores
        self.uneven = None if heads is None else UnevenPasses(views, heads, head_stage, scores)
        self.max_tokens = max_tokens
        self.shape = (facts.num_layers, facts.layers[0].num_kv_heads)
        self.positions = Positions(self.shape, facts.device)
        self.prompts: dict[str, int] = {}
        self.compressor = lru_cache(MAX_KEPT)(self._compressor)
        """The compressor of these settings; the last 16 are kept."""
        self.clock: PassClock = DeviceClock() if facts.device.type == "cuda" else HostClock()
        self.figures = WorkerFigures()
        self.trace: PassTrace | None = None
        self.compressor(options.settings)

    def begin(self, scheduler_output: Any) -> None:
        """Forget requests that have ended, then carry out the passes in order. Called first in a step."""
        if self.signals is not None:
            self.signals.forget(gone_requests(scheduler_output))
        if self.rows.num_shifted or self.trace is not None:
            self._forget(scheduler_output)
        message: StepMessage | None = getattr(scheduler_output, "kvreclaim", None)
        if message is None:
            return
        with torch.inference_mode():
            self.clock.start()
            chosen = self._choose(message)
            for one in message.passes:
                self._carry_out(one, self.compressor(message.settings[one.seq_id]), chosen[one.seq_id])
            self.clock.stop()

    def rehearse(self) -> None:
        """Choose once by the engine's settings over any cache content, without moves. Lazy loading, or a lack
        of memory, then shows before the first request."""
        settings = self.options.settings
        num_blocks = blocks_for(settings.budget + settings.interval, self.views.block_size)
        table = self.views.block_ids(range(min(num_blocks, self.views.num_blocks)))
        num_tokens = min(settings.budget + settings.interval, self.views.num_blocks * self.views.block_size)
        positions = torch.arange(num_tokens, dtype=torch.int32, device=self.facts.device)
        with torch.inference_mode():
            self.compressor(settings).choose(
                lambda layer: self.views.source(layer, table, num_tokens, self.stage),
                num_tokens,
                0,
                num_tokens,
                positions=positions[None, None],
                signals=self._rehearsed_signals(table, num_tokens),
                check=lambda _: None,
            )

    def _rehearsed_signals(self, blocks: Tensor, num_tokens: int) -> SignalSource:
        return lambda _: NO_SIGNALS

    def take_seconds(self) -> float | None:
        """Return the seconds of passes that have ended since the last call; None if none. Never waits."""
        ended = self.clock.take()
        if ended is None:
            return None
        seconds, flagged = ended
        self.figures.seconds += seconds
        for request_id in flagged:
            self._warn(request_id)
        return seconds

    def _warn(self, request_id: str) -> None:
        logger.error(
            "request %s: its keys scored NaN, so what was kept of it is arbitrary and its output cannot "
            "be trusted; other requests are not affected. Check the model's dtype and the statistics.",
            request_id,
        )

    def _compressor(self, settings: CompressionConfig) -> Compressor:
        return Compressor(settings, self.facts, self.stats, self.kernels)

    def _choose(self, message: StepMessage) -> dict[str, Choice]:
        """Choose for all passes of a step, before anything moves: those with the same settings together."""
        groups: dict[Compressor, list[Pass[str]]] = {}
        for one in message.passes:
            groups.setdefault(self.compressor(message.settings[one.seq_id]), []).append(one)
        found: dict[str, Choice] = {}
        for compressor, members in groups.items():
            for some in self._batches(members):
                names = [one.seq_id for one in some]
                chosen = self._choose_together(compressor, some, partial(self.clock.watch, names))
                found.update(zip(names, chosen, strict=True))
        return found

    def _choose_together(
        self, compressor: Compressor, passes: Sequence[Pass[str]], check: NanCheck
    ) -> Sequence[Choice]:
        uneven = self.uneven
        if uneven is None or not passes[0].eviction_method.uneven:
            return compressor.choose_all(
                [self._even_question(one, compressor) for one in passes], check=check
            )
        questions = [self._uneven_question(uneven, one, compressor) for one in passes]
        size, most = uneven.grid.block_size, uneven.heads.most_blocks
        return choose_uneven(compressor, questions, size, check, most)

    def _batches(self, passes: Sequence[Pass[str]]) -> Iterator[list[Pass[str]]]:
        """Split passes into batches of at most max_tokens."""
        batch: list[Pass[str]] = []
        for one in passes:
            if batch and sum(each.num_tokens for each in [*batch, one]) > self.max_tokens:
                yield batch
                batch = []
            batch.append(one)
        yield batch

    def _even_question(self, one: Pass[str], compressor: Compressor) -> PassQuestion:
        known = self._known_positions(one, compressor)
        positions = None if known is None else known.flat.view(*self.shape, -1)
        return replace(self._question(one, compressor), positions=positions, keep=one.keep)

    def _uneven_question(self, uneven: UnevenPasses, one: Pass[str], compressor: Compressor) -> HeadsQuestion:
        positions = self._known_positions(one, compressor)
        is_known = positions is not None or Signal.POSITIONS not in compressor.policy.needs
        assert is_known, f"request {one.seq_id}: a pass was not seen"
        whole = self._question(one, compressor, uneven.open_slots(one))
        return uneven.question(one, compressor, whole, positions)

    def _known_positions(self, one: Pass[str], compressor: Compressor) -> HeadRows | None:
        """Return the positions of all tokens, for policies that need them; None if an earlier pass was not
        seen."""
        needed = Signal.POSITIONS in compressor.policy.needs
        found = self.positions.of(one.seq_id, one.first) if needed else None
        return None if found is None else found.at(one.logical_len)

    def _question(self, one: Pass[str], compressor: Compressor, open_slots: int = 0) -> PassQuestion:
        """Return a compressor's input, without the open slots. Recent queries are then those before them."""
        blocks, num_tokens = self.views.block_ids(one.source_ids), one.num_tokens - open_slots
        end = one.logical_len - (open_slots if Signal.RECENT_QUERIES in compressor.policy.needs else 0)
        question = PassQuestion(
            lambda layer: self.views.source(layer, blocks, num_tokens, self.stage),
            num_tokens,
            one.prompt_slots + self.prompts.get(one.seq_id, 0),
            end,
            first=one.first,
        )
        if self.signals is None:
            return question
        signals = self.signals.source(compressor, one.seq_id, end, blocks, num_tokens)
        return replace(question, signals=signals)

    def _carry_out(self, one: Pass[str], compressor: Compressor, choice: Choice) -> None:
        needs_positions = Signal.POSITIONS in compressor.policy.needs
        if isinstance(choice, UnevenChoice):
            assert self.uneven is not None, "an uneven pass needs tables of heads"
            kept = self.uneven.move(one, choice, needs_positions or self.trace is not None)
        else:
            kept = self._compact(one, compressor, choice)
        if needs_positions and kept is not None:
            self.positions.keep(one.seq_id, one.first, one.logical_len, kept)
        self.rows.rewrite(one.seq_id, one.target_ids, one.shift)
        self.figures.tokens_evicted += one.num_tokens - one.keep
        self.figures.compactions += 1
        if self.trace is not None and kept is not None:
            self.trace.add(one, kept)

    def _compact(self, one: Pass[str], compressor: Compressor, kept: Tensor) -> HeadRows:
        """Keep equally many tokens in every head. Returns: the kept slots of each."""
        self.views.compact(kept, self.views.block_ids(one.source_ids), self.views.block_ids(one.target_ids))
        if one.eviction_method.uneven:  # for the scheduler heads differ, so it leaves the count to us
            prompt = one.prompt_slots + self.prompts.get(one.seq_id, 0)
            self.prompts[one.seq_id] = kept_prompt_slots(
                num_tokens=one.num_tokens, prompt_slots=prompt, keep=one.keep, **compressor.rules
            )
        return as_heads(kept, self.shape)

    def _forget(self, output: Any) -> None:
        if ended := gone_requests(output):
            self.rows.forget(ended)
            self.positions.forget(ended)
            for request_id in ended:
                self.prompts.pop(request_id, None)
            if self.uneven is not None:
                self.uneven.heads.forget(ended)
            if self.trace is not None:
                self.trace.forget(ended)


def gone_requests(output: Any) -> list[str]:
    """Return requests that have ended, lost their cache, or begin with an uncompressed cache."""
    return [
        *output.finished_req_ids,
        *(output.preempted_req_ids or ()),
        *(request.req_id for request in output.scheduled_new_reqs),
        *output.scheduled_cached_reqs.resumed_req_ids,
    ]


def _kernels(facts: ModelFacts) -> Backend:
    """Return the engine's choice of kernels for copies of the keys."""
    layers = tuple(staged_layer(layer) for layer in facts.layers)
    dtype = torch.bfloat16 if facts.dtype == torch.bfloat16 else torch.float32
    return choose_backend("auto", Need(layers, BLOCK_SIZE, dtype, facts.device, plain_format(dtype))).backend


def _stage(kernels: Backend, facts: LayerFacts, views: CacheViews) -> Stage | None:
    """Return the buffer of keys for kernels that cannot read the host's cache; None: no copy is needed."""
    if kernels.NAME == reference.NAME:
        return None
    exact = all(layer.stored == torch.bfloat16 for layer in views.layers)
    return Stage(kernels, facts, torch.bfloat16 if exact else torch.float32)
