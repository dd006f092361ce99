"""One forward pass of the model over a step's sequences."""

from __future__ import annotations

from collections.abc import Mapping
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
from kvreclaim.memory.changes import Growth
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.attention import KVBatch, Narrowed
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops import reference
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.native.linear import UNLIMITED, exact_rows, max_rows
from kvreclaim.ops.streamed import StreamedLayers
from kvreclaim.schedule import StepPlan
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

MOST_PLAIN_ROWS = 32
"""Up to so many rows of a step without drafts, each is computed as it would be alone; more where the kernels
are as fast as torch's products for more rows (ops/native/linear.max_rows)."""


@dataclass(slots=True, eq=False)
class _Inputs:
    """A step, flat: its tokens, and for each sequence the others' entry.

    num_exact: leading tokens whose rows come out as each would alone, to the bit
    positions: of its tokens; rows: of the flat step whose logits are wanted; wanted: the positions of these
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    wanted: list[range] = field(default_factory=list)
    slots: list[SequenceSlots] = field(default_factory=list)
    num_exact: int = 0


class ModelRunner:
    """Builds a step's tensors and runs the model. Holds the cache and nothing between steps.

    stream: where the cache lies in host memory: brings its layers to the device
    graphs: replays decode steps if there is one (on CUDA)
    extensions: see every observed step
    is_batch_invariant: every row comes out as it would alone, to the bit
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
        """Capture the graphs that requests with this compression need, and so many drafts in a step, before
        their first step."""
        if self.graphs is None:
            return
        self.graphs.expect_drafts(num_drafts)
        if compressor is not None:
            unequal = compressor.eviction_method is EvictionMethod.CELLS
            self.graphs.capture(GraphKind(unequal, keeps_queries(compressor)))

    def prepare(self, plan: StepPlan) -> None:
        """Make a plan's blocks ready to be written; to be called once for each plan, before forward."""
        self._late.clear()
        for extension in self.extensions.ordered:
            extension.prepare(plan)
        if plan.copies:
            self.moves.copy_blocks(self.cache, list(plan.copies))
            if self.signals.scores is not None:
                self.signals.scores.copy_blocks(list(plan.copies))
        if plan.fresh:
            self.moves.prepare_blocks(self.cache, list(plan.fresh))

    def make_ready(self, growth: Growth) -> None:
        """Blocks that have been taken between two steps can be written."""
        if growth.copies:
            self.moves.copy_blocks(self.cache, list(growth.copies))
            if self.signals.scores is not None:
                self.signals.scores.copy_blocks(list(growth.copies))
        if growth.new_blocks:
            self.moves.prepare_blocks(self.cache, list(growth.new_blocks))

    @torch.inference_mode()
    def forward(self, step: list[Scheduled], *, observed: bool = True) -> tuple[Tensor, list[range]]:
        """Compute the step and write its K/V. observed: what policies ask to be kept is.

        Returns: logits [rows, V], at most as many rows as the step has tokens, and, for each scheduled
        sequence, the token positions whose rows it owns, in order (position p predicts token p + 1); one of
        which no position is wanted owns the row of its last token, which tells whether all went well.
        If it raises, only slots that are written again have changed: any part of the step may be tried
        once more.
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
        """Replay the step if there is a graph for it, else run it over the pool or the streamed cache."""
        special = [item for item in step if not item.seq.request.is_plain]
        watched = observed and any(map(is_watched, [item.seq for item in special]))
        wanted = None if self.graphs is None else decode_positions(step)
        if self.graphs is not None and wanted is not None:
            logits = self._replay(self.graphs, step, special, watched)
            if logits is not None:
                return logits, wanted
        inputs = self._inputs(step, runs)
        if self.streamed is not None:
            hooks = [hook for each in extensions for hook in each.attend(runs, None)]
            return self._stream(self.streamed, inputs, hooks), inputs.wanted
        batch = AttentionBatch.build(tuple(inputs.slots), self.cache.block_size, self.device)
        observer = self.signals.observe(runs, batch) if watched else None
        parts: tuple[AttentionPart, ...] = ()
        if special:
            parts = split(runs, batch, self.memory, self.cache, self.ops, self.signals.digests)
        hooks = [hook for each in extensions for hook in each.attend(runs, batch)]
        return self._paged(step, inputs, batch, observer, hooks, parts), inputs.wanted

    def _paged(
        self,
        step: list[Scheduled],
        inputs: _Inputs,
        batch: AttentionBatch,
        observer: Observer | None,
        hooks: list[AttentionHook],
        parts: tuple[AttentionPart, ...],
    ) -> Tensor:
        """The logits over the pool's blocks.

        hooks: see each call before the observer does
        parts: of a step whose sequences are not all attended alike
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
        """The logits over a cache in host memory, which is written when all went well."""
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

    def record(self, stand: Mapping[int, int]) -> None:
        """Keep the signals of the drafts that stand, by sequence: nothing is kept of the others."""
        for late in self._late:
            late.record(stand)
        self._late.clear()
        for seq_id in stand:
            self.signals.digests.cut(seq_id, self.memory.table(seq_id).physical_len // self.cache.block_size)

    def _inputs(self, step: list[Scheduled], runs: list[Scheduled]) -> _Inputs:
        """runs: the step's items, or the runs of tokens that are computed of each, in their order"""
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
            want = wanted_positions(item)
            rows = want or range(end - 1, end)
            inputs.rows.append(np.arange(rows.start, rows.stop) - end + place)
            inputs.wanted.append(want)
        inputs.num_exact = UNLIMITED if self.is_batch_invariant else _num_exact(step, self._most_plain)
        return inputs

    def _replay(
        self,
        graphs: DecodeGraphs,
        step: list[Scheduled],
        special: list[Scheduled],
        watched: bool,
    ) -> Tensor | None:
        """The logits of a decode step from a CUDA graph; None if there is none for it."""
        if any(map(feeds_companion, {item.seq.request.verify for item in special})):
            graphs.refuse("a companion's policy keeps queries, attention or scores of tokens")
            return None
        if watched and not all(follow_from_queries(item.seq.request.compressor) for item in special):
            graphs.refuse("a policy keeps scores of tokens, or recalls some")
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
        """Where a sequence's keys lie when an item of it has been computed."""
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
    """Count the leading tokens of a step that belong to decoding sequences: what they draw is the same with
    drafts and without. More than most_plain that draw one token each are left to products that are faster for
    many."""
    count, guesses = 0, False
    for item in step:
        if item.num_known != 1:
            break
        count += item.row.num_tokens
        guesses = guesses or item.row.num_drafts > 0 or item.seq.request.verify is not None
    return count if guesses or count <= most_plain else 0
