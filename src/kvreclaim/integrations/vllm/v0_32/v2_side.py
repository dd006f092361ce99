"""The V2 model runner of vLLM 0.32 (v1/worker/gpu/model_runner.py; on a CPU v1/worker/cpu/model_runner.py).

The order of a step, in GPUModelRunner.execute_model: finish_requests, add_requests, update_requests (here the
passes run), block_tables.apply_staged_writes, prepare_inputs, prepare_attn (slots), the sampler's and
model_state.prepare_attn (lengths). Its InputBatch stays logical: positions are what the model rotates by, and
the sampler compares seq_lens with the prompt's length on the device, so that a shortened one would wait for
its prompt for ever. Physical are only the copies that attention gets:

    the row of the block table      rewritten by V2Rows.rewrite, appended to by vLLM
    the slots of the new tokens     from positions - shift
    seq_lens, and their bound on the host, by which FlashInfer and the CPU plan

and of several cache groups those of the one that is compressed.

Paths that are not real steps, and why they need nothing:

    profile_run, profile_cudagraph_memory  come before the cache exists, hence before adopt_v2
    warmup_kernels, mixed warm-up          made-up SchedulerOutputs without a message; they end their requests
    graph capture, _dummy_run (also of     idx_mapping is arange there, not slots of requests: only a batch
    data parallel ranks without work)      that the runner's prepare_attn has seen is shifted. Attention gets
                                           the buffer of lengths in these, too: a replay reads it
    nothing scheduled                      update_requests and the staged writes precede the early return
    dual batch overlap, context parallel   prepare their lengths elsewhere: refused at the start
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.settings.groups import full_group
from kvreclaim.integrations.vllm.v0_32.cells_graphs import CellsGraphs, add_graphs
from kvreclaim.integrations.vllm.v0_32.group_lengths import GroupLengths, install

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.worker.applier import Applier
    from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables


@dataclass(frozen=True, slots=True, eq=False)
class Shifted:
    """A batch with compressed requests, and its shifts [num_reqs] on the host and on the device."""

    batch: Any
    host: np.ndarray[Any, np.dtype[np.int32]]
    device: Tensor


class V2Rows:
    """Rows of a V2 runner: a request's row and shift lie at its slot, which another request gets after it.

    slots: of the requests with a shift; no other slot has one.
    seq_lens: [max_num_reqs] int32, physical. One buffer for ever: CUDA graphs hold its address.
    group: the cache group that is compressed
    lengths: of it, where there are several groups; None: all attention gets seq_lens
    """

    def __init__(self, runner: Any, heads: HeadTables | None = None) -> None:
        self.runner, self.heads = runner, heads
        self.slots: dict[str, int] = {}
        self.host = np.zeros(runner.max_num_reqs, dtype=np.int32)
        self.device = torch.zeros(runner.max_num_reqs, dtype=torch.int32, device=runner.device)
        self.seq_lens = torch.zeros_like(self.device)
        self.current: Shifted | None = None
        self.group = full_group(runner.kv_cache_config)
        several = len(runner.kv_cache_config.kv_cache_groups) > 1
        self.lengths = GroupLengths(runner) if several else None

    @property
    def num_shifted(self) -> int:
        return len(self.slots)

    def rewrite(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        """Before vLLM appends this step's blocks: staged writes of one launch may not overlap."""
        slot, tables = self.runner.req_states.req_id_to_index[request_id], self.runner.block_tables
        if self.lengths is None:
            tables.append_block_ids(slot, (list(block_ids),), overwrite=True)
        else:
            tables.block_tables[self.group].stage_write(slot, 0, list(block_ids))
            tables.num_blocks.np[self.group, slot] = len(block_ids)
        self.begin(request_id, shift)

    def begin(self, request_id: str, shift: int) -> None:
        slot = self.runner.req_states.req_id_to_index[request_id]
        self._set(slot, shift)
        self.slots[request_id] = slot

    def forget(self, request_ids: Iterable[str]) -> None:
        """Forget requests by their former slots, which vLLM has already reassigned."""
        for request_id in request_ids:
            slot = self.slots.pop(request_id, None)
            if slot is not None:
                self._set(slot, 0)

    def placed(self, batch: Any) -> Any:
        """The batch to compute slots by: its positions less the shifts. The batch is not changed."""
        self.current = None
        if not self.slots:
            return batch
        host = self.host[batch.idx_mapping_np]
        if not host.any():
            return batch
        self.current = Shifted(batch, host, self.device[batch.idx_mapping])
        starts = batch.query_start_loc[: len(host) + 1]
        per_token = torch.repeat_interleave(
            self.current.device, starts[1:] - starts[:-1], output_size=batch.num_tokens
        )
        return replace(batch, positions=batch.positions[: batch.num_tokens] - per_token)

    def held_after(self, batch: Any) -> np.ndarray[Any, Any]:
        """Return the tokens of each request in the cache after the step, or more. batch: BatchReqState"""
        at = batch.idx_mapping_np
        computed = self.runner.req_states.num_computed_tokens_np[at]
        held: np.ndarray[Any, Any] = computed + batch.num_scheduled_tokens - self.host[at]
        return held

    def place(self, batch: Any, slots: Tensor) -> None:
        """Write the slots of the compressed group into vLLM's slots [groups, tokens] of this batch."""
        placed = self.placed(batch)
        if placed is batch:
            return
        own = self.runner.block_tables.compute_slot_mappings(
            batch.idx_mapping,
            batch.query_start_loc,
            placed.positions,
            slots.shape[1],
            torch.empty_like(self.runner.block_tables.slot_mappings),
        )
        slots[self.group].copy_(own[self.group])

    def shortened(self, batch: Any) -> Any:
        """Return the batch for attention, with lengths in one fixed buffer, so that capture and replay agree.
        With several groups only the compressed one uses it, by its lengths."""
        shifted = self.current if self.current is not None and self.current.batch is batch else None
        if self.lengths is not None:
            self.lengths.step = None
            if shifted is not None:
                self.lengths.step = shifted.device, torch.from_numpy(shifted.host)
            return batch
        lens = self.seq_lens[: batch.seq_lens.shape[0]]
        lens.copy_(batch.seq_lens)
        bound = batch.seq_lens_cpu_upper_bound
        if shifted is not None:
            lens[: len(shifted.host)] -= shifted.device
            bound = bound.clone()
            bound[: len(shifted.host)] -= torch.from_numpy(shifted.host)
        return replace(batch, seq_lens=lens, seq_lens_cpu_upper_bound=bound)

    def _set(self, slot: int, shift: int) -> None:
        """Fill the buffer on the device in stream order, after earlier batches have read it, without sync."""
        self.host[slot] = shift
        self.device[slot : slot + 1].fill_(shift)


class V2Hooks:
    """Mixed into the runner's class. reclaim: set by adopt_v2."""

    reclaim: Applier

    def update_requests(self, scheduler_output: Any) -> None:
        """Passes first: new requests have their slots, finished ones have none, no block is appended yet.
        Before them a KV connector ends stores that read what they write; vLLM repeats this later."""
        if getattr(scheduler_output, "kvreclaim", None) is not None and has_kv_transfer_group():
            get_kv_transfer_group().handle_preemptions(scheduler_output.kv_connector_metadata)
        self.reclaim.begin(scheduler_output)
        super().update_requests(scheduler_output)  # type: ignore[misc]

    def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
        """Announce a step's requests to the tables of cells before vLLM selects a CUDA graph."""
        found = super().gather_batch_req_state(scheduler_output, dummy_run)  # type: ignore[misc]
        rows, batch = _rows(self.reclaim), found[0]
        if rows.heads is not None:
            names = () if batch is None else batch.req_ids
            rows.heads.announce(names, () if batch is None else rows.held_after(batch))
        return found

    def prepare_attn(self, input_batch: Any) -> Any:
        """Prepare real batches. Slots go into vLLM's own persistent buffer, from physical positions."""
        rows = _rows(self.reclaim)
        if rows.lengths is None:
            return super().prepare_attn(rows.placed(input_batch))  # type: ignore[misc]
        tables, slots = super().prepare_attn(input_batch)  # type: ignore[misc]
        rows.place(input_batch, slots)
        return tables, slots


class ReclaimModelState(DefaultModelState):
    """The runner's model_state, through which all attention metadata are made. reclaim: set by adopt_v2."""

    reclaim: Applier

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Prepare real batches, captures and dummy runs."""
        return super().prepare_attn(_rows(self.reclaim).shortened(input_batch), *args, **kwargs)


def adopt_v2(runner: Any, applier: Applier) -> None:
    """Have this runner carry out passes. After its cache is there and before graphs are captured. A later
    applier takes the place of an earlier one.

    Raises: UnsupportedModelError for a model with its own way of making attention metadata.
    """
    state = runner.model_state
    if type(state) not in (DefaultModelState, ReclaimModelState):
        raise UnsupportedModelError(
            f"kv_compression needs a decoder-only text model; {runner.model_config.model} runs with "
            f"{type(state).__name__} in vLLM's V2 model runner. Leave kv_compression out for it."
        )
    runner.reclaim = state.reclaim = applier
    rows = _rows(applier)
    if rows.heads is not None and runner.cudagraph_manager is not None:
        add_graphs(runner.cudagraph_manager, CellsGraphs, rows.heads)
    if rows.lengths is not None:
        install(runner, rows.group, rows.lengths)
    state.__class__ = ReclaimModelState
    if not isinstance(runner, V2Hooks):
        runner.__class__ = type(f"Reclaim{type(runner).__name__}", (V2Hooks, type(runner)), {})


def _rows(applier: Applier) -> V2Rows:
    rows = applier.rows
    assert isinstance(rows, V2Rows)
    return rows
