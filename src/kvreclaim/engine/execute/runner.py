"""One forward pass of the model over a step's sequences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.attend.paged import PagedKVBatch
from kvreclaim.engine.attend.parts import AttentionPart
from kvreclaim.engine.attend.split import reads_part, split
from kvreclaim.engine.attend.streamed import StreamedBatches
from kvreclaim.engine.attend.windows import window_batches
from kvreclaim.engine.execute.decode_rows import decode_positions, decode_step
from kvreclaim.engine.execute.graphs import DecodeGraphs, GraphKind
from kvreclaim.engine.extension import AttentionHook, Extension, Extensions
from kvreclaim.engine.request.request import Scheduled, Sequence, wanted_positions
from kvreclaim.engine.signals.late import LateSignals
from kvreclaim.engine.signals.needs import feeds_companion, follow_from_queries, is_watched, keeps_queries
from kvreclaim.engine.signals.observer import Observer
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.attention import KVBatch, Narrowed
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops import reference
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.native.decoder import UNLIMITED, exact_rows, max_rows
from kvreclaim.ops.streamed import StreamedLayers
from kvreclaim.schedule import StepPlan
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

MOST_PLAIN_ROWS = 32
"""Most rows of a step without drafts that are computed bitwise as each would be alone; more where the kernels
are as fast as torch's products for more rows (ops/native/decoder.max_rows)."""


@dataclass(slots=True, eq=False)
class _Inputs:
    """A flat step: its tokens, and one entry per sequence in the other lists.

    num_exact: leading tokens with rows that are bitwise equal to those of each sequence alone
    positions: of its tokens; rows: of the flat step that need logits; logit_positions: of these rows
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    logit_positions: list[range] = field(default_factory=list)
    slots: list[SequenceSlots] = field(default_factory=list)
    num_exact: int = 0


class ModelRunner:
    """Builds a step's tensors and runs the model. Keeps no state between steps except the cache.

    stream: copies layers of a cache in host memory to the device
    graphs: replays decode steps, if set (on CUDA)
    extensions: called in every observed step
    is_batch_invariant: every row is bitwise equal to that of its sequence alone
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: LayerGroups,
        memory: MemoryManager,
        cache: KVCache,
        backend: Backend,
        signals: Signals,
        stream: StreamedLayers | None = None,
        *,
        graphs: DecodeGraphs | None = None,
        extensions: Extensions | None = None,
        is_batch_invariant: bool = False,
    ) -> None:
        self.groups, self.layers = groups, groups.layers(cache, backend)
        self.model = loaded.model
        self.device = loaded.facts.device
        self.memory = memory
        self.cache = cache
        self.ops = backend
        on_device = cache.device.type == loaded.facts.device.type
        self.moves: Backend = backend if on_device else reference
        self.signals = signals
        self.stream = stream
        self.streamed = None
        if stream is not None:
            self.streamed = StreamedBatches(backend, stream, groups.places, self.device)
        self._has_windows = any(layer.softmax.window is not None for layer in groups.facts.layers)
        self.graphs = graphs
        self.extensions = Extensions() if extensions is None else extensions
        self.is_batch_invariant = is_batch_invariant
        self._most_plain = max(MOST_PLAIN_ROWS, max_rows(loaded.model.dtype))
        self._dtype = loaded.facts.dtype
        self._is_narrow = loaded.model.dtype is not self._dtype
        self._late: list[LateSignals] = []

    def expect(self, compressor: Compressor | None, num_drafts: int = 0) -> None:
        """Capture the graphs for requests with this compression and num_drafts drafts per step, before their
        first step."""
        if self.graphs is None:
            return
        self.graphs.expect_drafts(num_drafts)
        if compressor is not None:
            unequal = compressor.eviction_method is EvictionMethod.CELLS
            self.graphs.capture(GraphKind(unequal, keeps_queries(compressor)))

    def prepare(self, plan: StepPlan) -> None:
        """Make a plan's blocks ready for writes. Call it once per plan, before forward."""
        self._late.clear()
        for extension in self.extensions.ordered:
            extension.prepare(plan)
        self.make_ready(plan.copies, plan.fresh)

    def make_ready(self, copies: Iterable[tuple[int, int]], fresh: Iterable[int]) -> None:
        """Make allocated blocks ready for writes. copies: (source, target); fresh: blocks without content"""
        if pairs := list(copies):
            self.moves.copy_blocks(self.cache, pairs)
            if self.signals.scores is not None:
                self.signals.scores.copy_blocks(pairs)
        if blocks := list(fresh):
            self.moves.prepare_blocks(self.cache, blocks)

    @torch.inference_mode()
    def forward(self, step: list[Scheduled], *, observed: bool = True) -> tuple[Tensor, list[range]]:
        """Compute the step and write its K/V. observed: record the signals that policies need.

        Returns: logits [rows, V], at most one row per token of the step, and for each item the token
        positions of its rows, in order (position p predicts token p + 1). An item without such positions has
        the row of its last token, to check that it is finite.
        If it raises, only slots that are written again have changed, so any part of the step may be retried.
        """
        extensions = self.extensions.ordered if observed else ()
        runs = step
        for extension in extensions:
            runs = extension.expand(runs)
        try:
            found = self._compute(step, runs, extensions, observed)
            for extension in extensions:
                extension.attended(step)
        except Exception:
            self.signals.forget(step)
            for extension in extensions:
                extension.abandoned()
            raise
        return found

    def _compute(
        self,
        step: list[Scheduled],
        runs: list[Scheduled],
        extensions: tuple[Extension, ...],
        observed: bool,
    ) -> tuple[Tensor, list[range]]:
        """Replay the step from a graph, if there is one, or run it over the pool or the streamed cache."""
        special = [item for item in step if not item.seq.request.is_plain]
        watched = observed and any(map(is_watched, [item.seq for item in special]))
        positions = None if self.graphs is None else decode_positions(step)
        if self.graphs is not None and positions is not None:
            logits = self._replay(self.graphs, step, special, watched)
            if logits is not None:
                return logits, positions
        inputs = self._inputs(step, runs)
        if self.streamed is not None:
            hooks = [hook for each in extensions for hook in each.attend(runs, None)]
            return self._stream(self.streamed, inputs, hooks), inputs.logit_positions
        batch = AttentionBatch.build(tuple(inputs.slots), self.cache.block_size, self.device)
        observer = self.signals.observe(runs, batch) if watched else None
        parts: tuple[AttentionPart, ...] = ()
        if special:
            parts = split(runs, batch, self.memory, self.cache, self.ops, self.signals.digests)
        hooks = [hook for each in extensions for hook in each.attend(runs, batch)]
        return self._paged(step, inputs, batch, observer, hooks, parts), inputs.logit_positions

    def _paged(
        self,
        step: list[Scheduled],
        inputs: _Inputs,
        batch: AttentionBatch,
        observer: Observer | None,
        hooks: list[AttentionHook],
        parts: tuple[AttentionPart, ...],
    ) -> Tensor:
        """Return the logits over the pool's blocks.

        hooks: called for each attention call before the observer
        parts: of a step with several kinds of attention
        """
        if hooks:
            seen = observer or Observer(())
            observer = replace(seen, writes=(*hooks, *seen.writes))
        others: tuple[AttentionBatch, ...] = ()
        if self.groups.windows:
            others = window_batches(step, self.groups, self.memory, self.device)
        places = self.groups.places
        kv_batch = PagedKVBatch(self.ops, self.cache, self.layers, places, (batch, *others), observer, parts)
        logits = self._logits(inputs, kv_batch)
        if observer is not None:
            self._observed(observer)
        return logits

    def _observed(self, observer: Observer) -> None:
        observer.commit()
        if observer.late is not None:
            self._late.append(observer.late)

    def _stream(self, streamed: StreamedBatches, inputs: _Inputs, hooks: list[AttentionHook]) -> Tensor:
        """Return the logits over a cache in host memory, which is written only on success."""
        try:
            logits = self._logits(inputs, streamed.begin(inputs.slots, hooks))
            streamed.stream.commit()
        except Exception:
            streamed.stream.abandon()
            raise
        return logits

    def _logits(self, inputs: _Inputs, kv_batch: KVBatch) -> Tensor:
        if self._is_narrow:
            kv_batch = Narrowed(kv_batch, self._dtype)
        with exact_rows(inputs.num_exact):
            output = self.model(
                input_ids=torch.tensor([inputs.tokens], device=self.device),
                position_ids=torch.from_numpy(np.concatenate(inputs.positions))[None].to(self.device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(np.concatenate(inputs.rows)).to(self.device),
                kv_batch=kv_batch,
            )
        logits: Tensor = output.logits[0]
        return logits

    def record(self, num_accepted: Mapping[int, int]) -> None:
        """Record the signals of accepted drafts only. num_accepted: accepted tokens by seq_id"""
        for late in self._late:
            late.record(num_accepted)
        self._late.clear()
        for seq_id in num_accepted:
            self.signals.digests.cut(seq_id, self.memory.table(seq_id).physical_len // self.cache.block_size)

    def _inputs(self, step: list[Scheduled], runs: list[Scheduled]) -> _Inputs:
        """Flatten a step. runs: its items, or the runs of computed tokens of each, in their order"""
        inputs, last = _Inputs(), {}
        for run in runs:
            seq, row = run.seq, run.row
            inputs.tokens += run.tokens
            slots = self.slots(run)
            end = slots.seq_len + slots.shift
            inputs.slots.append(slots)
            inputs.positions.append(np.arange(end - row.num_tokens, end))
            last[seq.seq_id] = row.first + row.num_tokens, len(inputs.tokens)
        for item in step:
            end, place = last[item.seq.seq_id]
            positions = wanted_positions(item)
            rows = positions or range(end - 1, end)
            inputs.rows.append(np.arange(rows.start, rows.stop) - end + place)
            inputs.logit_positions.append(positions)
        inputs.num_exact = UNLIMITED if self.is_batch_invariant else _num_exact(step, self._most_plain)
        return inputs

    def _replay(
        self,
        graphs: DecodeGraphs,
        step: list[Scheduled],
        special: list[Scheduled],
        watched: bool,
    ) -> Tensor | None:
        """Return the logits of a decode step from a CUDA graph; None if there is none for it."""
        if any(map(feeds_companion, {item.seq.request.verify for item in special})):
            graphs.refuse("a companion's policy keeps queries, attention or scores of tokens")
            return None
        if watched and not all(follow_from_queries(item.seq.request.compressor) for item in special):
            graphs.refuse("a policy keeps scores of tokens")
            return None
        if any(map(reads_part, special)):
            graphs.refuse("a policy reads some of the blocks")
            return None
        if self._has_windows and any(self._slot_positions(item.seq) is not None for item in special):
            graphs.refuse("heads hold other positions")
            return None
        rows = decode_step(step, self.groups, self.memory)
        if not watched:
            return graphs.forward(rows)
        batch = AttentionBatch.build(tuple(map(self.slots, step)), self.cache.block_size, self.device)
        observer = self.signals.observe(step, batch)
        logits = graphs.forward(replace(rows, hands_out_queries=True))
        if logits is not None:
            observer.see_queries(graphs.queries[:, : len(logits)])
            self._observed(observer)
        return logits

    def slots(self, item: Scheduled) -> SequenceSlots:
        """Return the slots of a sequence's keys after an item of it has been computed."""
        table, row = self.memory.table(item.seq.seq_id), item.row
        relative = item.seq.slots_are_positions
        return SequenceSlots(
            block_ids=item.seq.block_row(table),
            query_len=row.num_tokens,
            seq_len=table.physical_len + row.first - item.seq.num_computed + row.num_tokens,
            shift=0 if relative else table.num_evicted,
            slot_positions=self._slot_positions(item.seq),
        )

    def _slot_positions(self, seq: Sequence) -> Tensor | None:
        return seq.state.slot_positions if self._has_windows and not seq.slots_are_positions else None


def _num_exact(step: list[Scheduled], most_plain: int) -> int:
    """Count the leading tokens of a step that belong to decoding sequences. They draw the same tokens with
    and without drafts. More than most_plain rows without drafts use products that are faster for many."""
    count, has_drafts = 0, False
    for item in step:
        if item.num_known != 1:
            break
        count += item.row.num_tokens
        has_drafts = has_drafts or item.row.num_drafts > 0 or item.seq.request.verify is not None
    return count if has_drafts or count <= most_plain else 0
