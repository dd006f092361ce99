"""A worker's state of requests' slots, kept for requests that begin with their snapshots."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

from kvreclaim.integrations.vllm.scheduler.snapshots import Begun, SnapshotNews
from kvreclaim.integrations.vllm.worker.applier import Applier, RunnerRows
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.cells.positions import HeadPositions, Positions
from kvreclaim.ops.cell_tables import CellTable


@dataclass(frozen=True, slots=True, eq=False)
class KeptState:
    """A worker's state of one snapshot.

    positions: for each of the Positions that are kept; None if they are unknown
    prompt:    leading prompt slots, if only the worker counts them
    cells:     of unequal heads
    """

    positions: list[HeadPositions | None]
    prompt: int | None
    cells: CellTable | None


class KeptStates:
    """The states of all snapshots, by their numbers.

    Args:
        prompts: see Applier
        heads:   None where heads keep equally many tokens
    """

    def __init__(self, prompts: dict[str, int], heads: HeadTables | None) -> None:
        self.prompts, self.heads = prompts, heads
        self.states: dict[int, KeptState] = {}

    def keep(self, news: SnapshotNews, positions: list[Positions]) -> None:
        """Keep states of new snapshots, before the step's ended requests are forgotten."""
        for number, num_tokens, request_id in news.kept:
            known = [each.known.get(request_id) for each in positions]
            cells = None if self.heads is None else self.heads.held.get(request_id)
            left = [each and each.until(num_tokens) for each in known]
            self.states[number] = KeptState(left, self.prompts.get(request_id), cells)

    def begin(self, news: SnapshotNews, positions: list[Positions]) -> None:
        """Begin requests with snapshots, after ended ones are forgotten and the passes are done."""
        for one in news.begun:
            state = self.states[one.number]
            for each, known in zip(positions, state.positions, strict=False):
                if known is not None:
                    each.known[one.request_id] = known
            if state.prompt is not None:
                self.prompts[one.request_id] = one.num_tokens - one.shift if one.all_prompt else state.prompt
            if state.cells is not None and self.heads is not None:
                self.heads.put(one.request_id, self._cells(one, state.cells, self.heads.grid.block_size))
        for number in news.dropped:
            self.states.pop(number, None)

    def _cells(self, one: Begun, cells: CellTable, block_size: int) -> CellTable:
        if not one.all_prompt:
            return cells
        tokens = (cells.counts - cells.num_blocks) * block_size + one.num_tokens - one.shift
        return replace(cells, prompt_slots=tokens)


class BeginningRows(RunnerRows, Protocol):
    """Rows of requests that may begin with a snapshot."""

    def begin(self, request_id: str, shift: int) -> None:
        """Begin a new request with a shift, position minus slot. The runner already has its blocks."""
        ...


class SnapshotApplier(Applier):
    """Applier that keeps the states of snapshots, and restores them for requests that begin with them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.kept = KeptStates(self.prompts, None if self.uneven is None else self.uneven.heads)

    def begin(self, scheduler_output: Any) -> None:
        news: SnapshotNews | None = getattr(scheduler_output, "kvreclaim_snapshots", None)
        if news is None:
            super().begin(scheduler_output)
            return
        positions = [self.positions] if self.trace is None else [self.positions, self.trace.positions]
        self.kept.keep(news, positions)
        super().begin(scheduler_output)
        self.kept.begin(news, positions)
        for begun in news.begun:
            cast(BeginningRows, self.rows).begin(begun.request_id, begun.shift)
