"""Decode steps as CUDA graphs: one launch replays a whole forward pass over buffers that never move."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvreclaim import speculation
from kvreclaim.config import EngineConfig
from kvreclaim.engine.execute.graph_buffers import (
    POSITION,
    TOKEN,
    SentCells,
    StepBuffers,
    TableRows,
)
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.memory.windows import Place
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.backend import Backend
from kvreclaim.ops.cell_tables import CellTable
from kvreclaim.ops.cells import cell_layers
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.kv_cache import KVCache, LayerCache

logger = logging.getLogger(__name__)

FEW_ROWS = 16
"""Padded batch sizes are powers of two up to here, then multiples of it."""

MOST_DRAFTED = 512
"""Rows of a step with drafts up to which it is replayed, if there are more than sequences."""

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function of fixed buffers into one that computes the same from what they hold later. May call it;
raises RuntimeError if it cannot be captured."""


class GraphBackend(Backend, Protocol):
    """A back-end with a decode that can be replayed: it reads no length on the host. Its write_kv
    writes a token with a negative slot nowhere."""

    def static_tables(
        self, block_table: Tensor, seq_lens: Tensor, shifts: Tensor, *, num_kv_heads: int, max_seq_len: int
    ) -> Any: ...

    def decode_attention(self, q: Tensor, layer: LayerCache, tables: Any) -> Tensor: ...


class CudaCapture:
    """torch.cuda.CUDAGraph; all graphs share one memory pool, since one runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = None

    def __call__(self, run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            for _ in range(2):
                run()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        # Copies to the host tier go on in other threads.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            output = run()
        self._pool = self._pool or graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return output

        return replay


def padded_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, 8, 16, 32, 48, ... up to max_num_seqs, which is always one of them.

    >>> padded_sizes(40)
    (1, 2, 4, 8, 16, 32, 40)
    """
    powers = [1 << i for i in range(FEW_ROWS.bit_length())]
    sizes = [*powers, *range(2 * FEW_ROWS, max_num_seqs, FEW_ROWS)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


class GraphKind(NamedTuple):
    """Kinds of steps that have graphs of their own.

    unequal: heads hold unequal numbers of tokens
    queries: the step hands out its queries, for policies that keep some of them
    """

    unequal: bool = False
    queries: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Attended:
    """One table of a graph: slots [R] int64 of the step's tokens, and the back-end's tables."""

    slots: Tensor
    tables: Any


@dataclass(frozen=True, slots=True, eq=False)
class _ReplayedKVBatch:
    """model.attention.KVBatch over the buffers of a graph.

    layers, places: as of PagedKVBatch; attended: each block table of the step
    cells: of a step with unequal heads: the layers of the cell view and the back-end's tables, each for all
           layers of the cache
    queries: [L, R, H, D] where the queries of each layer of full attention go, if the step hands them out
    """

    ops: GraphBackend
    layers: tuple[LayerCache, ...]
    places: tuple[Place, ...]
    attended: tuple[_Attended, ...]
    cells: tuple[tuple[LayerCache, Any], ...] = ()
    queries: Tensor | None = None

    def destination(self, layer: int) -> tuple[LayerCache, Tensor]:
        """Return the place of a layer in the cache, and the slots [R] of the step's tokens."""
        return self.layers[layer], self.attended[self.places[layer].table].slots

    def attend(self, call: AttentionCall) -> Tensor:
        layer, place = call.served_by(self.layers[call.layer]), self.places[call.layer]
        own = self.attended[place.table]
        if self.queries is not None and not place.table:
            self.queries[place.layer].copy_(call.q)
        if not call.is_stored:
            self.ops.write_kv(layer, call.k, call.v, own.slots)
        if place.table or not self.cells:
            return self.ops.decode_attention(call.q, layer, own.tables)
        by_head = call.q.unflatten(1, (call.k.shape[1], -1)).flatten(0, 1)
        found = self.ops.decode_attention(by_head, *self.cells[place.layer])
        return found.view(len(call.q), -1, found.shape[-1])


@dataclass(frozen=True, slots=True, eq=False)
class DecodeStep:
    """A step in which every sequence brings its next token, and maybe drafts behind it. Each of these is a
    row, which attends like a sequence of one query: a layer writes all rows' keys before any row attends.

    tokens:    one for each row; positions: [N] int64
    tables:    the rows in the table of full attention and in that of each group of windows
    cells:     where passes have put those of each row, if the heads of some hold unequal numbers of tokens
    hands_out_queries: DecodeGraphs.queries are needed when it has run
    """

    tokens: Sequence[int]
    positions: np.ndarray
    tables: Sequence[TableRows]
    cells: Sequence[CellTable | None] | None = None
    hands_out_queries: bool = False

    @property
    def kind(self) -> GraphKind:
        """The kind of graph that it needs."""
        return GraphKind(self.cells is not None, self.hands_out_queries)


class DecodeGraphs:
    """Runs decode steps by replay: one graph per padded number of rows and kind, captured by `capture` or
    at its first use.

    A step that cannot be replayed is refused with None, for the caller to run as usual; `refusals`
    counts the reasons, each of which is logged once.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        backend: GraphBackend,
        groups: LayerGroups,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_chunk: int,
        capture: Capture,
        num_drafts: int = 0,
    ) -> None:
        """max_chunk: most tokens of a sequence in one step; windows hold so many more
        num_drafts: most drafts of a sequence in one step, as far as is known (expect_drafts)"""
        self.model = model
        self.cache = cache
        self.ops = backend
        self.groups = groups
        self.layers = groups.layers(cache, backend)
        self.refusals: Counter[str] = Counter()
        self._capture, self._max_num_seqs = capture, max_num_seqs
        size = cache.block_size
        self._widths, self._lengths = [(blocks_for(max_model_len, size), size)], [max_model_len]
        for n, _ in groups.tables:
            window = groups.windows[n]
            most = window.most_blocks(max_model_len, max_chunk, size) // groups.num_groups(window)
            self._widths.append((most, size // groups.parts))
            self._lengths.append(min(max_model_len, window.num_tokens))
        self._begin(num_drafts)

    def _begin(self, num_drafts: int) -> None:
        """Have buffers for steps with so many drafts of each sequence, and no graphs yet."""
        self.num_drafts, plain = num_drafts, padded_sizes(self._max_num_seqs)
        drafted = {size for n in plain if (size := n * (num_drafts + 1)) <= MOST_DRAFTED}
        self.sizes = tuple(sorted({*plain, *drafted}))
        self._replays: dict[tuple[int, GraphKind], Callable[[], Tensor]] = {}
        self._failed: dict[tuple[int, GraphKind], str] = {}
        self._buffers = StepBuffers.allocate(self.sizes[-1], self._widths, self.cache.device)
        self._cells: SentCells | None = None
        self._queries: Tensor | None = None

    def expect_drafts(self, num_drafts: int) -> None:
        """Let steps be replayed in which each sequence brings up to so many drafts, too. If that takes larger
        buffers, what was captured is captured anew."""
        if num_drafts <= self.num_drafts:
            return
        before = self._replays  # CUDA's memory pool stays with its graphs until there are new ones
        self._begin(1 << (num_drafts - 1).bit_length())
        for kind in sorted({kind for _, kind in before}):
            self.capture(kind)

    @torch.inference_mode()
    def capture(self, kind: GraphKind = GraphKind()) -> None:  # noqa: B008, frozen
        """Capture all sizes that have not been, the largest first: the others reuse its memory."""
        done = self._replays.keys() | self._failed.keys()
        missing = [size for size in self.sizes[::-1] if (size, kind) not in done]
        if not missing:
            return
        name = "capturing CUDA graphs" + (" for unequal heads" if kind.unequal else "")
        for size in tqdm(missing, desc=name, disable=None, leave=False):
            self._prepare(size, kind)

    @torch.inference_mode()
    def forward(self, step: DecodeStep) -> Tensor | None:
        """Compute a step, and write its K/V.

        Returns: logits [N, V], valid until the next call; None if the step cannot be replayed.
        """
        num_rows = len(step.tokens)
        reason = self._obstacle(step)
        if reason is None:
            size = next(size for size in self.sizes if size >= num_rows)
            reason = self._prepare(size, step.kind)
        if reason is not None:
            self.refuse(reason)
            return None
        self._buffers.fill(size, step.tokens, step.positions, step.tables)
        if step.cells is not None:
            self._cell_tables().send(step.cells, step.tables[0].block_ids)
        return self._replays[size, step.kind]()[:num_rows]

    @property
    def queries(self) -> Tensor:
        """The queries [L, rows, H, D] of the last step that handed them out, in the layers of full attention.
        Valid until the next such step. Rows beyond its own are padding."""
        if self._queries is None:
            layers = self.groups.facts.layers
            shape = (len(layers), self.sizes[-1], layers[0].num_heads, layers[0].head_dim)
            self._queries = torch.zeros(shape, dtype=self.groups.facts.dtype, device=self.cache.device)
        return self._queries

    def _obstacle(self, step: DecodeStep) -> str | None:
        if not step.tokens:
            return "it has no sequence"
        if len(step.tokens) > self.sizes[-1]:
            return f"it has more than {self.sizes[-1]} rows"
        for table, rows in zip(self._buffers.tables, step.tables, strict=True):
            if max(map(len, rows.block_ids)) > table.width:
                return f"a sequence has more than {table.width} blocks"
        if step.cells is not None:
            pairs = zip(step.cells, step.tables[0].block_ids, strict=True)
            most = [len(ids) if own is None else len(ids) - own.num_blocks + own.most for own, ids in pairs]
            if max(most) > self._cell_tables().width:
                return f"a head has more than {self._cell_tables().width} blocks"
        return None

    def _cell_tables(self) -> SentCells:
        if self._cells is None:
            self._cells = SentCells(self.sizes[-1], self._buffers.tables[0].width, self.cache)
        return self._cells

    def _prepare(self, size: int, kind: GraphKind) -> str | None:
        """Capture the graph of a padded size, once; the reason if that fails. Other sizes are still tried."""
        key = size, kind
        if key in self._replays or key in self._failed:
            return self._failed.get(key)
        nothing = np.zeros(0, dtype=np.int64)
        empty = TableRows((), nothing, nothing)
        self._buffers.fill(size, [], nothing, [empty] * len(self._buffers.tables))
        try:
            queries = self.queries[:, :size] if kind.queries else None  # made outside of the capture
            self._replays[key] = self._capture(lambda: self._run(size, kind.unequal, queries))
        except RuntimeError as error:
            first_line = str(error).strip().splitlines()[:1]
            self._failed[key] = f"its capture failed: {type(error).__name__}: {''.join(first_line)}"
        return self._failed.get(key)

    def _run(self, size: int, unequal: bool = False, queries: Tensor | None = None) -> Tensor:
        """The forward pass over the first rows of the buffers: what is captured."""
        numbers, buffers, heads = self._buffers.numbers[:size], self._buffers, self.cache.num_kv_heads
        attended = []
        for n, length in enumerate(self._lengths):
            slots, table, lengths, shifts = buffers.of_table(n, size)
            how = {"num_kv_heads": heads, "max_seq_len": length}
            attended.append(_Attended(slots, self.ops.static_tables(table, lengths, shifts, **how)))
        cells = self._run_cells(size) if unequal else ()
        output = self.model(
            input_ids=numbers[:, TOKEN][None].contiguous(),
            position_ids=numbers[:, POSITION][None].contiguous(),
            use_cache=False,
            logits_to_keep=0,
            kv_batch=_ReplayedKVBatch(
                self.ops, self.layers, self.groups.places, tuple(attended), cells, queries
            ),
        )
        return output.logits[0]

    def _run_cells(self, size: int) -> tuple[tuple[LayerCache, Any], ...]:
        """Each layer of the cell view with the back-end's tables: a sequence for each KV head of each row."""
        own = self._cell_tables()
        physical = self._buffers.of_table(0, size)[2][:, None]
        lengths = ((own.offsets[:, :size] + physical) * (physical > 0)).flatten(1)
        tables, nothing = own.device[:, :size].flatten(1, 2), torch.zeros_like(lengths[0])
        most = min(self._lengths[0], own.width * self.cache.block_size)
        return tuple(
            (layer, self.ops.static_tables(table, held, nothing, num_kv_heads=1, max_seq_len=most))
            for layer, table, held in zip(cell_layers(self.cache), tables, lengths, strict=True)
        )

    def refuse(self, reason: str) -> None:
        """Count a step that runs without a graph. The first time, log the reason."""
        self.refusals[reason] += 1
        if self.refusals[reason] == 1:
            level = logging.WARNING if reason in self._failed.values() else logging.INFO
            logger.log(level, "decode graphs: a step runs without a graph, because %s", reason)


def decode_graphs(
    model: nn.Module, cache: KVCache, backend: Any, config: EngineConfig, groups: LayerGroups
) -> DecodeGraphs | None:
    """Capture the graphs of an engine: on CUDA, for a GraphBackend, unless switched off. Those for unequal
    heads are captured for the first such request."""
    if cache.device.type != "cuda" or not hasattr(backend, "static_tables") or config.enforce_eager:
        return None
    assert config.max_model_len is not None, "limits are chosen before the engine is made"
    drafts = speculation.from_json(config.speculative_config)
    graphs = DecodeGraphs(
        model,
        cache,
        backend,
        groups,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_chunk=config.max_num_batched_tokens,
        capture=CudaCapture(),
        num_drafts=drafts.num_speculative_tokens if drafts else 0,
    )
    graphs.capture()
    return graphs
