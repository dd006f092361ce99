"""One forward pass of the model over a step's sequences."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.core.request import Scheduled
from kvreclaim.engine.execute.graphs import DecodeGraphs
from kvreclaim.engine.execute.latent import latent_parts
from kvreclaim.engine.recall.refresh import Refresher
from kvreclaim.engine.signals.needs import is_watched
from kvreclaim.engine.signals.signals import Observer, Signals
from kvreclaim.engine.tiers.tiers import Tiers
from kvreclaim.engine.ways.chunks import Bringer, Scout, expanded, has_chunks
from kvreclaim.engine.ways.pages import block_row, slots_are_positions
from kvreclaim.engine.ways.parts import Part, attend_all
from kvreclaim.engine.ways.split import has_head_tables, split
from kvreclaim.engine.ways.windows import window_batches
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.memory.windows.window import Place
from kvreclaim.model.attention import AttentionCall, LatentCall
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.schedule import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class PagedKVBatch:
    """Serves the attention layers of one forward pass from the paged cache (model.attention.KVBatch).

    layers:   every layer of the model, at `places` in the tables
    batches:  of each table; the first one's is that of compression, observers and parts, whose layers are the
              layers of the cache
    observer: sees every call, if policies of the step need signals
    parts:    make the batch up; none if it is attended as a whole
    """

    ops: Backend
    cache: KVCache
    layers: tuple[LayerCache, ...]
    places: tuple[Place, ...]
    batches: tuple[AttentionBatch, ...]
    observer: Observer | None = None
    parts: tuple[Part, ...] = ()

    @property
    def batch(self) -> AttentionBatch:
        return self.batches[0]

    def attend(self, call: AttentionCall) -> Tensor:
        layer, place = call.served_by(self.layers[call.layer]), self.places[call.layer]
        if place.table:
            batch = self.batches[place.table]
            self.ops.write_kv(layer, call.k, call.v, batch.slot_mapping)
            return self.ops.paged_attention(call.q, layer, batch)
        if place.layer != call.layer:
            call = replace(call, layer=place.layer)
        self.ops.write_kv(layer, call.k, call.v, self.batch.slot_mapping)
        if self.observer is not None:
            self.observer.see(call)
        if self.parts:
            return attend_all(self.parts, call)
        return self.ops.paged_attention(call.q, layer, self.batch)

    def attend_latent(self, call: LatentCall) -> Tensor:
        """[T, H, dv]: over latents, with keys and values expanded for the sequences whom that serves."""
        parts = () if self.parts else latent_parts(call, self.batch)
        if not parts:
            return call.weights.finish(self.attend(call.absorbed()))
        new = call.call
        layer = new.served_by(self.layers[new.layer])
        self.ops.write_kv(layer, new.k, new.v, self.batch.slot_mapping)
        if self.observer is not None:
            self.observer.see(call.absorbed())
        out = new.q.new_empty((*new.q.shape[:2], call.weights.w_uv.shape[1]))
        for part in parts:
            part.attend(call, self.ops, layer, out)
        return out


@dataclass(slots=True, eq=False)
class _Inputs:
    """A step, flat: its tokens, and for each sequence the others' entry.

    positions: of its tokens; rows: of the flat step whose logits are wanted; wanted: the positions of these
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[np.ndarray] = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    wanted: list[range] = field(default_factory=list)
    slots: list[SequenceSlots] = field(default_factory=list)


class ModelRunner:
    """Builds a step's tensors and runs the model. Holds the cache and nothing between steps.

    graphs: replays decode steps if there is one (on CUDA)
    tiers:  where the memory has host slots; refresher: where there is cold memory
    """

    def __init__(
        self,
        loaded: LoadedModel,
        groups: LayerGroups,
        memory: MemoryManager,
        cache: KVCache,
        backend: Backend,
        signals: Signals,
    ) -> None:
        self.groups, self.layers = groups, groups.layers(cache, backend)
        self.model = loaded.model
        self.device = loaded.facts.device
        self.memory = memory
        self.cache = cache
        self.ops = backend
        self.signals = signals
        self._has_windows = any(layer.softmax.window is not None for layer in groups.facts.layers)
        self.bringer = Bringer(memory, cache, backend, groups.facts)
        self.graphs: DecodeGraphs | None = None
        self.tiers: Tiers | None = None
        self.refresher: Refresher | None = None

    def prepare(self, plan: StepPlan) -> None:
        """Make a plan's blocks ready to be written; to be called once for each plan, before forward.

        Rows of blocks that are not full, where the format keeps such, are kept for the blocks that the next
        tokens of all sequences go to, whether they take part or not, and for those that are copied.
        """
        if self.tiers is not None:
            self.tiers.move(plan)
        if self.cache.open is not None:
            sources = (source for source, _ in plan.copies)
            self.ops.keep_open(self.cache, {*self.memory.unfilled(), *sources})
            if self.tiers is not None:
                self.tiers.parking.fill_rows()
        if plan.copies:
            self.ops.copy_blocks(self.cache, list(plan.copies))
            if self.signals.scores is not None:
                self.signals.scores.copy_blocks(list(plan.copies))
        if plan.fresh:
            self.ops.prepare_blocks(self.cache, list(plan.fresh))

    @torch.inference_mode()
    def forward(self, step: list[Scheduled]) -> tuple[Tensor, list[range]]:
        """Compute the step and write its K/V.

        Returns: logits [rows, V], at most as many rows as the step has tokens, and, for each scheduled
        sequence, the token positions whose rows it owns, in order (position p predicts token p + 1); one of
        which no position is wanted owns the row of its last token, which tells whether all went well.
        If it raises, only slots that are written again have changed: any part of the step may be tried
        once more.
        """
        reusing = [item for item in step if has_chunks(item)]
        for item in reusing:
            self.bringer.bring(item)
        runs = expanded(step) if reusing else step
        inputs, watched = self._inputs(step, runs), any(is_watched(item.seq) for item in step)
        logits = self._replay(step, inputs, watched)
        if logits is not None:
            return logits, inputs.wanted
        batch = AttentionBatch.build(tuple(inputs.slots), self.cache.block_size, self.device)
        others = window_batches(step, self.groups, self.memory, self.device)
        observer = self.signals.observe(runs, batch) if watched else None
        if self.refresher is not None:
            observer = self.refresher.beside(observer, runs)
        if scout := Scout(runs, batch, self.cache, self.ops) if reusing else None:
            observer = scout.beside(observer)
        try:
            parts = split(runs, batch, self.memory, self.cache, self.ops, self.signals.digests)
            output = self.model(
                input_ids=torch.tensor([inputs.tokens], device=self.device),
                position_ids=torch.from_numpy(np.concatenate(inputs.positions))[None].to(self.device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(np.concatenate(inputs.rows)).to(self.device),
                kv_batch=PagedKVBatch(
                    self.ops, self.cache, self.layers, self.groups.places, (batch, *others), observer, parts
                ),
            )
            if observer is not None:
                observer.commit()
            for item in reusing:
                self.bringer.bring_last(item)
        except Exception:
            self.signals.forget(step)
            raise
        return output.logits[0], inputs.wanted

    def _inputs(self, step: list[Scheduled], runs: list[Scheduled]) -> _Inputs:
        """runs: the step's items, or the runs of tokens that are computed of each, in their order"""
        inputs, last = _Inputs(), {}
        for run in runs:
            seq, start = run.seq, run.row.first
            inputs.tokens += seq.token_ids[start : start + run.num_tokens]
            slots = self._slots(run)
            end = slots.seq_len + slots.shift
            inputs.slots.append(slots)
            inputs.positions.append(np.arange(end - run.num_tokens, end))
            last[seq.seq_id] = start + run.num_tokens, len(inputs.tokens)
        for item in step:
            end, place = last[item.seq.seq_id]
            want = _wanted_positions(item)
            rows = want or range(end - 1, end)
            inputs.rows.append(np.arange(rows.start, rows.stop) - end + place)
            inputs.wanted.append(want)
        return inputs

    def _replay(self, step: list[Scheduled], inputs: _Inputs, watched: bool) -> Tensor | None:
        """The logits of a decode step from a CUDA graph; None if there is none for it."""
        if self.graphs is None or not all(
            len(want) == item.num_tokens == 1 for want, item in zip(inputs.wanted, step, strict=True)
        ):
            return None
        if self.groups.windows:
            self.graphs.refuse("layers with sliding windows have block tables of their own")
        elif watched:
            self.graphs.refuse("a policy keeps queries, attention or scores of tokens")
        elif any(has_head_tables(item) for item in step):
            self.graphs.refuse("heads have block tables of their own")
        else:
            return self.graphs.forward(inputs.tokens, np.concatenate(inputs.positions), tuple(inputs.slots))
        return None

    def _slots(self, item: Scheduled) -> SequenceSlots:
        table = self.memory.table(item.seq.seq_id)
        relative = slots_are_positions(item.seq)
        return SequenceSlots(
            block_ids=block_row(item.seq, self.memory),
            query_len=item.num_tokens,
            seq_len=table.physical_len + item.row.first - item.seq.num_computed + item.num_tokens,
            shift=0 if relative else table.num_evicted,
            evicted=item.seq.state.evicted,
            slot_positions=item.seq.state.slot_positions if self._has_windows and not relative else None,
        )


def _wanted_positions(item: Scheduled) -> range:
    """The positions of this chunk whose logits are needed: the last known token's, and every one that
    predicts a token whose probability is asked for, of a continuation that is scored or of the prompt."""
    seq, start = item.seq, item.seq.num_computed
    request, end, known = seq.request, start + item.num_tokens, len(seq.token_ids)
    if request.scores is not None:
        return range(min(end, max(start, seq.num_prompt - 1)), min(end, known - 1))
    first = end - 1 if end == known else end
    if request.prompt_logprobs is not None and request.lacks_prompt_logprobs:
        first = min(first, max(start, len(request.prompt_logprobs) - 1))
    return range(first, end)
