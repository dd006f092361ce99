"""The tables of a step in which every (request, KV head) is a sequence of its own.

The cells left by a request's last pass are in a row of a pool on the device. A step's tables are computed
from these rows and the host's own block table, for all requests at once: each head has the cells of its last
pass, then its own cells of the blocks appended since. A request without a pass has only the latter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import torch
from torch import Tensor

from kvreclaim.integrations.vllm.worker.cells.grid import CellGrid
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.cell_tables import CellTable
from kvreclaim.ops.moving import to_device

MAX_ENTRIES = 1 << 23
"""Most entries of tables that are made at once; about 24 bytes of scratch each."""
UNSEEN = 0
"""The row of requests that no pass has touched."""


@dataclass(frozen=True, slots=True, eq=False)
class StepCells:
    """One step; R = N * K rows, (request, KV head) in this order, each with the G query heads of its head.

    tables:        [L, R, W] int32 cells; lengths [L, R] int32 tokens, those of this step included
    starts:        [R + 1] int32, of the queries of each row
    order:         [T * K] int64, which (token, KV head) the queries are that the rows name; None: as they are
    max_query_len: of a row; max_seq_len: of a row, or a little more
    tokens:        [T] int64 in the batch, if other tokens of it are not over cells; None: all are
    """

    tables: Tensor
    lengths: Tensor
    starts: Tensor
    order: Tensor | None
    num_heads: int
    max_query_len: int
    max_seq_len: int
    tokens: Tensor | None = None

    def rows_of(self, queries: Tensor) -> Tensor:
        """[T, H, D] -> [T * K, G, D], contiguous."""
        grouped = queries.reshape(queries.shape[0] * self.num_heads, -1, queries.shape[-1])
        return grouped if self.order is None else grouped[self.order]

    def put_back(self, rows: Tensor, output: Tensor) -> None:
        """Write rows [T * K, G, D] into output [T, H * D] or [T, H, D], contiguous."""
        grouped = output.view(rows.shape)
        if self.order is None:
            grouped.copy_(rows)
        else:
            grouped[self.order] = rows


class StepKind(Enum):
    """What attention reads in a step: vLLM's own tables, cells of all requests, or first vLLM's tables, then
    cells of the requests that fit tables of cells. The others are longer, and have no cells of their own."""

    PLAIN = auto()
    CELLS = auto()
    SPLIT = auto()


@dataclass(frozen=True, slots=True, eq=False)
class Announced:
    """The requests of a step that are over cells.

    rows:   [n] int64 of the pool
    ahead:  tokens by which a head is longer than its request, at most
    places: of these requests in the step; None: all requests are over cells
    """

    rows: Tensor
    ahead: int
    places: np.ndarray | None


class HeadTables:
    """Tables of all requests on this worker.

    Args:
        grid:       where cells lie
        max_rows:   requests in a step, at most; max_tokens: their tokens
        fixed:      tokens of a head at most, where buffers must never move (CUDA graphs); None: they grow
        most:       tokens that a pass leaves a head at most; None: no limit

    taken: whether the last metadata had cells
    """

    def __init__(
        self,
        grid: CellGrid,
        max_rows: int,
        max_tokens: int,
        fixed: int | None = None,
        most: int | None = None,
    ) -> None:
        self.grid = grid
        self.fixed = fixed
        self.most_blocks = None if most is None else most // grid.block_size
        self.taken = self._capturing = False
        self.rows: dict[str, int] = {}
        self.held: dict[str, CellTable] = {}
        device, (layers, heads) = grid.device, grid.shape
        width = 1 if fixed is None else blocks_for(fixed, grid.block_size)
        rows = 1 if fixed is None else max_rows + 1
        self._free = list(range(1, rows))
        self._table = torch.zeros((rows, layers, heads, width), dtype=torch.int32, device=device)
        self._counts = torch.zeros((rows, layers, heads), dtype=torch.int32, device=device)
        self._blocks = torch.zeros(rows, dtype=torch.int32, device=device)
        self._ahead = [0] * rows  # tokens by which the longest head of a row is longer than its request
        self._first = torch.from_numpy(grid.first).to(device, torch.int32)[None, :, None, None]
        self._heads = torch.arange(heads, dtype=torch.int32, device=device)[:, None] * grid.per_head
        self._tables = torch.zeros((layers, max_rows * heads, width), dtype=torch.int32, device=device)
        self._lengths = torch.zeros((layers, max_rows * heads), dtype=torch.int32, device=device)
        self._starts = torch.zeros(max_rows * heads + 1, dtype=torch.int32, device=device)
        self._order = torch.zeros(max_tokens * heads, dtype=torch.int64, device=device)
        self._next: Announced | None = None

    def put(self, request_id: str, cells: CellTable) -> None:
        """Set the cells of the request's heads. Blocks that are appended to its table follow them."""
        self.held[request_id] = cells
        row = self.rows.get(request_id)
        if row is None:
            row = self.rows[request_id] = self._free.pop() if self._free else len(self._ahead)
        self._make_room(row, cells.table.shape[-1])
        self._table[row, ..., : cells.table.shape[-1]] = to_device(
            torch.from_numpy(cells.table), self.grid.device
        )
        self._counts[row] = to_device(torch.from_numpy(cells.counts.astype(np.int32)), self.grid.device)
        self._blocks[row : row + 1].fill_(cells.num_blocks)
        self._ahead[row] = (int(cells.counts.max()) - cells.num_blocks) * self.grid.block_size

    def forget(self, request_ids: Iterable[str]) -> None:
        """Free the requests' rows. Steps that read them were launched before the next write of these rows."""
        for request_id in request_ids:
            if self.held.pop(request_id, None) is not None:
                self._free.append(self.rows.pop(request_id))

    @property
    def kind(self) -> StepKind:
        """What the next metadata will be, for the choice of a CUDA graph."""
        if self._capturing or (self._next is not None and self._next.places is None):
            return StepKind.CELLS
        return StepKind.PLAIN if self._next is None else StepKind.SPLIT

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Give metadata of made-up requests cells, as graphs of steps over cells are captured with."""
        self._capturing = True
        try:
            yield
        finally:
            self._capturing = False

    def announce(self, request_ids: Sequence[str], lengths: Sequence[int] | np.ndarray) -> None:
        """Announce the requests of the next step, in the order of its rows. A request without cells of its
        own is over cells if it fits their tables and another one has cells.

        lengths: tokens of each in the cache after the step, or more
        """
        self._next = None
        if not self.rows:
            return
        rows = np.array([self.rows.get(request_id, UNSEEN) for request_id in request_ids], dtype=np.int64)
        if not rows.any():
            return
        ahead = np.array([self._ahead[row] for row in rows])
        longest = ahead + lengths
        fits = longest <= (longest.max() if self.fixed is None else self.fixed)
        assert not rows[~fits].any(), f"heads of {longest.max()} tokens in tables for {self.fixed}"
        places = None if fits.all() else np.flatnonzero(fits)
        self._next = Announced(to_device(rows[fits], self.grid.device), int(ahead.max()), places)

    def take(
        self,
        block_table: Tensor,
        seq_lens: Tensor,
        query_starts: Tensor,
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        host_starts: Tensor | None = None,
    ) -> StepCells | None:
        """The tables of the step that was announced; None if heads share one table in all its requests.

        Args:
            block_table:  [N, >= W] int32 blocks as the back-end counts them
            seq_lens:     [N] int32 tokens in the cache
            query_starts: [N + 1] int32; host_starts: the same on the host, read where a step is split
            num_tokens:   T, of all requests
        """
        announced, self._next = self._next, None
        self.taken = announced is not None or self._capturing
        if not self.taken:
            return None
        device = self.grid.device
        tokens: Tensor | None = None
        if announced is not None and announced.places is not None:
            assert host_starts is not None, "a split step comes with its starts on the host"
            host, places = host_starts.numpy(), announced.places
            own = np.concatenate([[0], np.diff(host)[places].cumsum()]).astype(np.int32)
            at = to_device(places, device)
            tokens = to_device(np.concatenate([np.arange(*host[i : i + 2]) for i in places]), device)
            block_table, seq_lens = block_table[at], seq_lens[at]
            query_starts, num_tokens = to_device(own, device), len(tokens)
        count = seq_lens.shape[0]
        rows = torch.zeros(count, dtype=torch.int64, device=device)
        longest = max_seq_len
        if announced is not None:
            rows[: len(announced.rows)] = announced.rows
            longest += announced.ahead
        if self.fixed is not None:
            longest = self.fixed if self._capturing else min(longest, self.fixed)
        tables, lengths = self._fill(rows, block_table, seq_lens, blocks_for(longest, self.grid.block_size))
        starts, order = self._queries(query_starts, count, num_tokens, max_query_len)
        num_heads = self.grid.num_kv_heads
        return StepCells(tables, lengths, starts, order, num_heads, max_query_len, longest, tokens)

    def _fill(self, rows: Tensor, block_table: Tensor, seq_lens: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """Every head's cells [L, N * K, W] and tokens [L, N * K], in the buffers that stay where they are; as
        many layers at once as scratch allows."""
        (layers, heads), count = self.grid.shape, len(rows)
        self._grow(count * heads, width)
        tables = self._tables[:, : count * heads]  # whole rows: what lies behind is never read
        lengths = self._lengths[:, : count * heads]
        if self.fixed is not None:
            self._lengths[:, count * heads :] = 0  # a graph may have been captured with more rows
        step = max(1, MAX_ENTRIES // (count * heads * width))
        for some in (slice(start, start + step) for start in range(0, layers, step)):
            counts, blocks = self._counts[rows, some], self._blocks[rows][:, None, None]
            cells = self._cells(rows, some, counts, blocks, block_table, width)
            tables[some].view(-1, count, heads, tables.shape[-1])[..., :width].copy_(cells.transpose(0, 1))
            tokens = seq_lens[:, None, None] + (counts - blocks) * self.grid.block_size
            tokens = torch.where(seq_lens[:, None, None] > 0, tokens, 0)  # a graph's padding
            lengths[some].view(-1, count, heads).copy_(tokens.transpose(0, 1))
        return tables, lengths

    def _cells(
        self, rows: Tensor, layers: slice, counts: Tensor, blocks: Tensor, block_table: Tensor, width: int
    ) -> Tensor:
        """[N, l, K, W] int32: those of the last pass, then each head's own of the blocks that came since."""
        places = torch.arange(width, dtype=torch.int32, device=self.grid.device)
        later = (places - counts[..., None] + blocks[..., None]).clamp_(0, block_table.shape[1] - 1)
        appended = block_table.gather(1, later.flatten(1).long()).view_as(later).int()
        natural = appended.mul_(self.grid.per_block).add_(self._first[:, layers] + self._heads)
        known = self._table[rows, layers][..., places.clamp(max=self._table.shape[-1] - 1)]
        return torch.where(places < counts[..., None], known, natural)

    def _queries(
        self, starts: Tensor, count: int, num_tokens: int, max_query_len: int
    ) -> tuple[Tensor, Tensor | None]:
        """The queries of each row: [N * K + 1] int32 starts, and the order of its queries.

        Fixed buffers are written to their ends: a graph of mixed steps reads the order in decode steps too,
        and a graph may have been captured with more rows or tokens.
        """
        heads, device = self.grid.num_kv_heads, self.grid.device
        starts = starts[: count + 1]
        lens = starts.diff()
        every = torch.arange(heads, dtype=torch.int32, device=device)
        inner = (starts[:-1, None] * heads + every * lens[:, None]).flatten()
        of_rows = self._starts[: count * heads + 1]
        torch.cat([inner, starts[-1:] * heads], out=of_rows)
        if self.fixed is not None:
            self._starts[count * heads + 1 :] = of_rows[-1]
            torch.arange(len(self._order), out=self._order)
        if max_query_len == 1:
            return of_rows, None
        tokens = torch.arange(num_tokens, device=device)
        owner = torch.bucketize(tokens, starts[1:].long(), right=True).clamp(max=count - 1)
        place = (tokens - starts[owner])[:, None] + every * lens[owner][:, None]
        target = starts[owner][:, None].long() * heads + place
        source = torch.arange(num_tokens * heads, device=device)
        padding = tokens[:, None] >= starts[-1]  # a graph's padding stays where it is
        order = self._order[: num_tokens * heads]
        order[torch.where(padding, source.view(-1, heads), target).flatten()] = source
        return of_rows, order

    def _make_room(self, row: int, width: int) -> None:
        """Make room for a row number and a width in cells. Buffers that a graph reads do not move."""
        more = max(0, row + 1 - len(self._ahead))
        wider = max(0, width - self._table.shape[-1])
        if more:
            more = max(more, len(self._ahead))
            self._ahead += [0] * more
            self._free += range(row + 1, len(self._ahead))
        if more or wider:
            pad, wider = torch.nn.functional.pad, max(wider, self._table.shape[-1]) if wider else 0
            self._table = pad(self._table, (0, wider, 0, 0, 0, 0, 0, more))
            self._counts = pad(self._counts, (0, 0, 0, 0, 0, more))
            self._blocks = pad(self._blocks, (0, more))

    def _grow(self, rows: int, width: int) -> None:
        have = self._tables.shape
        if rows <= have[1] and width <= have[2]:
            return
        assert self.fixed is None, f"{rows} rows of {width} cells in buffers of {tuple(have)}"
        shape = have[0], max(rows, have[1]), max(width, 2 * have[2] if width > have[2] else have[2])
        self._tables = self._tables.new_zeros(shape)
        self._lengths = self._lengths.new_zeros(shape[:2])
