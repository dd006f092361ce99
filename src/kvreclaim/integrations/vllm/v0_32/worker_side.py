"""The workers of vLLM 0.32: passes in a model runner. This file is for the V1 runner, which CPUs and GPUs
share; v2_side.py is for V2.

A runner that is adopted gets a subclass of its own class; no class of vLLM changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from kvreclaim.integrations.vllm.settings.groups import full_group
from kvreclaim.integrations.vllm.v0_32.cells_graphs import CellsDispatch, add_graphs
from kvreclaim.integrations.vllm.v0_32.group_lengths import GroupLengths, install
from kvreclaim.integrations.vllm.worker.applier import Applier, RunnerRows
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables


def is_v2(runner: Any) -> bool:
    """Return whether the runner is of vLLM's second generation."""
    return bool(runner.vllm_config.use_v2_model_runner)


def rows_of(runner: Any, heads: HeadTables | None) -> RunnerRows:
    """The adapter to the runner's block tables. It passes the requests of a step to heads with own tables."""
    if is_v2(runner):
        from kvreclaim.integrations.vllm.v0_32.v2_side import V2Rows

        rows: RunnerRows = V2Rows(runner, heads)
        return rows
    return V1Rows(runner, heads)


def adopt(runner: Any, applier: Applier) -> None:
    """Make the runner carry out the passes of a step's message. The applier's rows are rows_of(runner).
    Idempotent; a later applier replaces an earlier one."""
    if is_v2(runner):
        from kvreclaim.integrations.vllm.v0_32.v2_side import adopt_v2

        adopt_v2(runner, applier)
        return
    runner.reclaim = applier
    runner.reclaim_rows = applier.rows
    rows: Any = applier.rows
    if rows.lengths is not None:
        install(runner, rows.group, rows.lengths)
    if rows.heads is not None:
        add_graphs(runner.cudagraph_dispatcher, CellsDispatch, rows.heads)
    if not isinstance(runner, V1Hooks):
        runner.__class__ = type(f"Reclaim{type(runner).__name__}", (V1Hooks, type(runner)), {})


def carrier(output: Any) -> Any:
    """The part of a step's output that reaches the scheduler, attributes included; None if there is none."""
    for name in ("_model_runner_output", "model_runner_output"):  # V1 and V2, asynchronous
        output = getattr(output, name, output)
    return None if output is EMPTY_MODEL_RUNNER_OUTPUT else output


class V1Rows:
    """Rows of the V1 runner.

    shifts: request -> position minus slot, of requests where they differ
    buffer: [max_num_reqs] int32, the shifts of a step's batch; persistent, as pinned copies need it
    group:  the cache group that is compressed
    lengths: of it, where there are several groups; None: the runner's own are changed
    step:   the buffer with the shifts of the present step's batch; None: all are 0
    """

    step: Any = None

    def __init__(self, runner: Any, heads: HeadTables | None = None) -> None:
        self.runner, self.heads = runner, heads
        self.group = full_group(runner.kv_cache_config)
        several = len(runner.kv_cache_config.kv_cache_groups) > 1
        self.lengths = GroupLengths(runner) if several else None
        self.shifts: dict[str, int] = {}
        self.buffer = runner._make_buffer(runner.max_num_reqs, dtype=torch.int32)
        if runner.device.type == "cpu":
            self.buffer.gpu = self.buffer.cpu

    @property
    def num_shifted(self) -> int:
        return len(self.shifts)

    def rewrite(self, request_id: str, block_ids: Sequence[int], shift: int) -> None:
        """Rewrite the request's state, from which a row is made when it returns to the batch, and its row if
        it has one."""
        ids = list(block_ids)
        self.runner.requests[request_id].block_ids[self.group][:] = ids
        row = self.runner.input_batch.req_id_to_index.get(request_id)
        if row is not None:
            tables = self.runner.input_batch.block_table
            table, blocks = (tables, (ids,)) if self.lengths is None else (tables[self.group], ids)
            table.clear_row(row)
            table.add_row(blocks, row)
        self.shifts[request_id] = shift

    def begin(self, request_id: str, shift: int) -> None:
        self.shifts[request_id] = shift

    def forget(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.shifts.pop(request_id, None)

    def of_batch(self, request_ids: Sequence[str]) -> Any:
        """The buffer with these requests' shifts, on its way to the device; None if all are 0. It is step
        until the next call."""
        self.step = None
        if not self.shifts:
            return None
        count, get = len(request_ids), self.shifts.get
        shifts = np.fromiter((get(request_id, 0) for request_id in request_ids), np.int32, count)
        if not shifts.any():
            return None
        self.buffer.np[:count] = shifts
        self.buffer.copy_to_gpu(count)
        self.step = self.buffer
        return self.step


class V1Hooks:
    """Over GPUModelRunner. Positions stay logical; lengths and slots, which only attention reads, become
    those of the cache. Buffers are edited in place: CUDA graphs hold their addresses."""

    reclaim: Applier
    reclaim_rows: V1Rows

    def _update_states(self, scheduler_output: Any) -> Any:
        """Our rows first: this step's new blocks are appended to them."""
        self.reclaim.begin(scheduler_output)
        return super()._update_states(scheduler_output)  # type: ignore[misc]

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        """After vLLM's, which decides by logical lengths which requests are sampled."""
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        runner: Any = self
        batch = runner.input_batch
        shift, lengths = self.reclaim_rows.of_batch(batch.req_ids), self.reclaim_rows.lengths
        if self.reclaim_rows.heads is not None:
            logical = runner.optimistic_seq_lens_cpu.numpy()[: batch.num_reqs]
            held = logical if shift is None else logical - shift.np[: batch.num_reqs]
            self.reclaim_rows.heads.announce(batch.req_ids, held)
        if shift is not None:
            count, tokens = batch.num_reqs, scheduler_output.total_num_scheduled_tokens
            if lengths is None:
                runner.seq_lens[:count] -= shift.gpu[:count]
                runner.optimistic_seq_lens_cpu[:count] -= shift.cpu[:count]
            slots = runner.positions[:tokens] - shift.gpu[runner.req_indices.gpu[:tokens]]
            table = batch.block_table if lengths is None else batch.block_table[self.reclaim_rows.group]
            table.compute_slot_mapping(count, runner.query_start_loc.gpu[: count + 1], slots)
        if lengths is not None:
            count = batch.num_reqs
            lengths.step = None if shift is None else (shift.gpu[:count], shift.cpu[:count])
        return result

    def _dummy_run(self, *args: Any, **kwargs: Any) -> Any:
        """Run without shifts and cells: a dummy run's lengths are not of requests."""
        if self.reclaim_rows.lengths is not None:
            self.reclaim_rows.lengths.step = None
        if self.reclaim_rows.heads is not None:
            self.reclaim_rows.heads.announce((), ())
        return super()._dummy_run(*args, **kwargs)  # type: ignore[misc]

    def _warmup_and_capture(self, desc: Any, cudagraph_runtime_mode: Any, *args: Any, **kwargs: Any) -> None:
        """Capture vLLM's graph; a full one once more, over cells."""
        super()._warmup_and_capture(desc, cudagraph_runtime_mode, *args, **kwargs)  # type: ignore[misc]
        heads = self.reclaim_rows.heads
        if heads is not None and cudagraph_runtime_mode == CUDAGraphMode.FULL:
            with heads.capture():
                super()._warmup_and_capture(desc, cudagraph_runtime_mode, *args, **kwargs)  # type: ignore[misc]
