"""The rows of a decode step: each sequence's newest token and its drafts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvreclaim.engine.attend.windows import window_parts
from kvreclaim.engine.execute.graph_buffers import TableRows
from kvreclaim.engine.execute.graphs import DecodeStep
from kvreclaim.engine.request.request import Scheduled, wanted_positions
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.ops.cell_tables import CellTable
from kvreclaim.ops.groups import LayerGroups


def decode_positions(step: list[Scheduled]) -> list[range] | None:
    """Return wanted_positions of the items of a decode step, which are all that each computes; None for
    another step."""
    found = []
    for item in step:
        row, seq = item.row, item.seq
        if row.num_tokens - row.num_drafts != 1:
            return None
        if len(seq.token_ids) == row.first + 1 and seq.request.scores is None:
            found.append(range(row.first, row.first + row.num_tokens))
        elif len(positions := wanted_positions(item)) == row.num_tokens:
            found.append(positions)
        else:
            return None
    return found


def decode_step(step: list[Scheduled], groups: LayerGroups, memory: MemoryManager) -> DecodeStep:
    """Return the rows of a decode step."""
    tokens: list[int] = []
    lengths: list[int] = []
    shifts: list[int] = []
    blocks: list[np.ndarray] = []
    cells: list[CellTable | None] = []
    tables = memory.full.tables
    for item in step:
        seq, row = item.seq, item.row
        table = tables[seq.seq_id]
        shift = table.logical_len - table.physical_len
        if shift and seq.slots_are_positions:
            shift = 0
        first = table.physical_len + row.first - seq.num_computed + 1
        ids = seq.block_row(table)
        tokens.append(seq.token_ids[row.first])
        lengths.append(first)
        shifts.append(shift)
        blocks.append(ids)
        cells.append(seq.state.cells)
        if count := row.num_drafts:
            tokens += seq.draft_ids[:count]
            lengths += range(first + 1, first + 1 + count)
            shifts += [shift] * count
            blocks += [ids] * count
            cells += [seq.state.cells] * count
    full = TableRows(blocks, np.array(lengths, dtype=np.int64), np.array(shifts, dtype=np.int64))
    positions = full.lengths + full.shifts - 1
    is_even = cells.count(None) == len(cells)
    return DecodeStep(tokens, positions, [full, *_windows(step, groups, memory)], None if is_even else cells)


def _windows(step: list[Scheduled], groups: LayerGroups, memory: MemoryManager) -> Iterator[TableRows]:
    """Yield the rows for each group of layers with windows."""
    for n, window in enumerate(groups.windows):
        parts = [part for item in step for part in window_parts(item, n, window, groups.parts, memory)]
        rows = [(ids, end - new + 1 + i) for ids, new, end in parts for i in range(new)]
        lengths = np.array([length for _, length in rows], dtype=np.int64)
        for group in range(groups.num_groups(window)):
            yield TableRows([ids[group] for ids, _ in rows], lengths, np.zeros_like(lengths))
