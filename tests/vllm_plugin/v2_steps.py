"""Inputs of attention and the sampler in each step of a V2 runner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engines import Engine


@dataclass(frozen=True, slots=True)
class Row:
    """One request in one step. physical: positions for attention; logical: for the sampler.

    table, shift: the scheduler's; slots: of its new tokens; ends_at: its position after the step
    """

    name: str
    index: int
    logical: int
    physical: int
    bound: int
    shift: int
    table: list[int]
    slots: list[int]
    ends_at: int


@dataclass(frozen=True, slots=True)
class Step:
    """Inputs of attention in one step, and their addresses."""

    rows: list[Row]
    pointers: tuple[int, int, int]
    logical_pointer: int


class Spy:
    """Looks at every step between its forward and its sampling."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.steps = engine, []
        self.inner = engine.runner.sample_tokens
        engine.runner.sample_tokens = self

    def __call__(self, grammar_output: Any) -> Any:
        state = self.engine.runner.execute_model_state
        if state is not None:
            self.steps.append(self._look(state))
        return self.inner(grammar_output)

    def _look(self, state: Any) -> Step:
        batch, given = state.input_batch, next(iter(state.attn_metadata.values()))
        starts = batch.query_start_loc_np
        rows = []
        for n, request_id in enumerate(batch.req_ids):
            rows.append(
                Row(
                    name=request_id,
                    index=int(batch.idx_mapping_np[n]),
                    logical=int(batch.seq_lens[n]),
                    physical=int(given.seq_lens[n]),
                    bound=given.max_seq_len,
                    shift=self.engine.scheduler.reclaim.records[request_id].account.num_evicted,
                    table=table_of(self.engine, request_id),
                    slots=given.slot_mapping[starts[n] : starts[n + 1]].tolist(),
                    ends_at=int(batch.positions[starts[n + 1] - 1]) + 1,
                )
            )
        return Step(rows, pointers_of(given), batch.seq_lens.data_ptr())


def pointers_of(given: Any) -> tuple[int, int, int]:
    """Addresses of attention metadata that a CUDA graph holds: lengths, slots of new tokens, block table."""
    return given.seq_lens.data_ptr(), given.slot_mapping.data_ptr(), given.block_table.data_ptr()


def table_of(engine: Engine, request_id: str) -> list[int]:
    """The scheduler's blocks of a request, without placeholders."""
    tables = engine.scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
    return [block.block_id for block in tables[request_id] if not block.is_null]
