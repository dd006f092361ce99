"""One forward pass of the model over a step's sequences."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.compression import block_row, slots_are_positions
from kvreclaim.engine.graphs import DecodeGraphs
from kvreclaim.engine.parts import Part, has_head_tables, split
from kvreclaim.engine.scheduler import Scheduled
from kvreclaim.engine.signals import Observer, Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.attention import AttentionCall
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.batch import AttentionBatch, SequenceSlots
from kvreclaim.ops.kv_cache import KVCache


@dataclass(frozen=True, slots=True, eq=False)
class PagedKVBatch:
    """Serves the attention layers of one forward pass from the paged cache (model.attention.KVBatch).

    observer: sees every call, if policies of the step need signals
    parts:    attend in turn to their rows; none if the batch is attended as a whole
    """

    ops: Backend
    cache: KVCache
    batch: AttentionBatch
    observer: Observer | None = None
    parts: tuple[Part, ...] = ()

    def attend(self, call: AttentionCall) -> Tensor:
        self.ops.write_kv(self.cache, call.layer, call.k, call.v, self.batch.slot_mapping)
        if self.observer is not None:
            self.observer.see(call)
        if self.parts:
            out = call.q.new_empty((*call.q.shape[:2], self.cache.v_head_dim))
            for part in self.parts:
                part.attend(call, out)
            return out
        return self.ops.paged_attention(
            call.q,
            self.cache,
            call.layer,
            self.batch,
            scale=call.scale,
            softcap=call.softcap,
            window=call.window,
            sinks=call.sinks,
        )


class ModelRunner:
    """Builds a step's tensors and runs the model. Holds the cache and nothing between steps.

    graphs: replays decode steps if there is one (on CUDA)
    """

    def __init__(
        self,
        loaded: LoadedModel,
        memory: MemoryManager,
        cache: KVCache,
        backend: Backend,
        signals: Signals,
    ) -> None:
        self.model = loaded.model
        self.device = loaded.facts.device
        self.memory = memory
        self.cache = cache
        self.ops = backend
        self.signals = signals
        self._has_windows = any(layer.sliding_window is not None for layer in loaded.facts.layers)
        self.graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def forward(self, step: list[Scheduled]) -> tuple[Tensor, list[range]]:
        """Compute the step and write its K/V.

        Returns: logits [rows, V] and, for each scheduled sequence, the token positions whose
        rows it owns, in order (position p predicts token p + 1).
        """
        self._prepare_blocks(step)
        tokens: list[int] = []
        positions: list[np.ndarray] = []
        rows: list[np.ndarray] = []
        wanted: list[range] = []
        slots: list[SequenceSlots] = []
        for item in step:
            seq, start = item.seq, item.seq.num_computed
            want = _wanted_positions(item)
            rows.append(np.arange(want.start, want.stop) - start + len(tokens))
            wanted.append(want)
            tokens += seq.token_ids[start : start + item.num_tokens]
            slots.append(self._slots(item))
            end = slots[-1].seq_len + slots[-1].shift
            positions.append(np.arange(end - item.num_tokens, end))
        watched = self.signals.watches(step)
        if self.graphs is not None and all(
            len(want) == item.num_tokens == 1 for want, item in zip(wanted, step, strict=True)
        ):
            if watched:
                self.graphs.refuse("a policy keeps its queries or its attention")
            elif any(has_head_tables(item.seq) for item in step):
                self.graphs.refuse("heads have block tables of their own")
            else:
                logits = self.graphs.forward(tokens, np.concatenate(positions), tuple(slots))
                if logits is not None:
                    return logits, wanted
        batch = AttentionBatch.build(tuple(slots), self.cache.block_size, self.device)
        observer = self.signals.observe(step, batch) if watched else None
        parts = split(step, batch, self.memory, self.cache, self.ops, self.signals.digests)
        output = self.model(
            input_ids=torch.tensor([tokens], device=self.device),
            position_ids=torch.from_numpy(np.concatenate(positions))[None].to(self.device),
            use_cache=False,
            logits_to_keep=torch.from_numpy(np.concatenate(rows)).to(self.device),
            kv_batch=PagedKVBatch(self.ops, self.cache, batch, observer, parts),
        )
        return output.logits[0], wanted

    def _prepare_blocks(self, step: list[Scheduled]) -> None:
        copies = [pair for item in step for pair in item.growth.copies]
        if copies:
            self.ops.copy_blocks(self.cache, copies)
        fresh = [block for item in step for block in item.growth.new_blocks]
        if fresh:
            self.ops.prepare_blocks(self.cache, fresh)

    def _slots(self, item: Scheduled) -> SequenceSlots:
        table = self.memory.table(item.seq.seq_id)
        relative = slots_are_positions(item.seq)
        return SequenceSlots(
            block_ids=block_row(item.seq, self.memory),
            query_len=item.num_tokens,
            seq_len=table.physical_len + item.num_tokens,
            shift=0 if relative else table.num_evicted,
            evicted=item.seq.state.evicted,
            slot_positions=item.seq.state.slot_positions if self._has_windows and not relative else None,
        )


def _wanted_positions(item: Scheduled) -> range:
    """The positions of this chunk whose logits are needed: the last known token's, or, for a request
    that is scored, every one that predicts a given continuation token."""
    seq, start = item.seq, item.seq.num_computed
    end = start + item.num_tokens
    known = len(seq.token_ids)
    if seq.request.scores is not None:
        return range(min(end, max(start, seq.num_prompt - 1)), min(end, known - 1))
    return range(end - 1, end) if end == known else range(end, end)
