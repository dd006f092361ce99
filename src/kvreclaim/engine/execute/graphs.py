"""Decode steps as CUDA graphs: one launch replays a whole forward pass over buffers that never move."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from kvreclaim.config import EngineConfig
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.attention import AttentionCall
from kvreclaim.ops.batch import SequenceSlots
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.kv_cache import KVCache, LayerCache
from kvreclaim.ops.moving import fill

logger = logging.getLogger(__name__)

FEW_ROWS = 16
"""Padded batch sizes are powers of two up to here, then multiples of it."""

TOKEN, POSITION, SLOT, LENGTH, SHIFT = range(5)
NO_SLOT = -1

Capture = Callable[[Callable[[], Tensor]], Callable[[], Tensor]]
"""Turns a function of fixed buffers into one that computes the same from what they hold later. May call it;
raises RuntimeError if it cannot be captured."""


class GraphBackend(Protocol):
    """A back-end whose decode can be replayed, in addition to ops.backend.Backend: nothing about the
    lengths is read on the host. write_kv writes a token with a negative slot nowhere."""

    def write_kv(self, layer: LayerCache, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None: ...

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
        with torch.cuda.graph(graph, pool=self._pool):
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


@dataclass(frozen=True, slots=True, eq=False)
class _ReplayedKVBatch:
    """model.attention.KVBatch over the buffers of a graph."""

    ops: GraphBackend
    cache: KVCache
    slot_mapping: Tensor
    tables: Any

    def attend(self, call: AttentionCall) -> Tensor:
        layer = call.served_by(self.cache.layers[call.layer])
        self.ops.write_kv(layer, call.k, call.v, self.slot_mapping)
        return self.ops.decode_attention(call.q, layer, self.tables)


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBuffers:
    """Inputs of a step's graph. Rows beyond the step's are empty sequences that are written nowhere.

    numbers: [R, 5] int64: token, position, slot, physical length, shift of each row
    table:   [R, W] int32 block ids; table_host: the same on the host, so that only what changed is sent
    """

    numbers: Tensor
    table: Tensor
    table_host: np.ndarray

    @classmethod
    def allocate(cls, num_rows: int, width: int, device: torch.device) -> DecodeBuffers:
        numbers = torch.zeros((num_rows, 5), dtype=torch.int64, device=device)
        numbers[:, SLOT] = NO_SLOT
        table = torch.zeros((num_rows, width), dtype=torch.int32, device=device)
        return cls(numbers, table, np.zeros((num_rows, width), dtype=np.int32))

    def fill(
        self,
        num_rows: int,
        tokens: list[int],
        positions: np.ndarray,
        sequences: tuple[SequenceSlots, ...],
        block_size: int,
    ) -> None:
        """One step's values in the first rows, empty sequences up to num_rows."""
        used = len(sequences)
        numbers = np.zeros((num_rows, 5), dtype=np.int64)
        numbers[:used, TOKEN], numbers[:used, POSITION] = tokens, positions
        numbers[:, SLOT] = NO_SLOT
        for i, seq in enumerate(sequences):
            block, offset = divmod(seq.seq_len - 1, block_size)
            numbers[i, SLOT:] = int(seq.block_ids[block]) * block_size + offset, seq.seq_len, seq.shift
            ids = self.table_host[i, : len(seq.block_ids)]
            if not np.array_equal(ids, seq.block_ids):
                ids[:] = seq.block_ids
                fill(self.table[i, : len(ids)], ids)
        fill(self.numbers[:num_rows], numbers)


class DecodeGraphs:
    """Runs plain decode steps by replay: one graph per padded batch size, captured by `capture` or at its
    first use.

    A step that cannot be replayed is refused with None, for the caller to run as usual; `refusals`
    counts the reasons, each of which is logged once.
    """

    def __init__(
        self,
        model: nn.Module,
        cache: KVCache,
        backend: GraphBackend,
        *,
        max_num_seqs: int,
        max_model_len: int,
        capture: Capture,
    ) -> None:
        self.model = model
        self.cache = cache
        self.ops = backend
        self.sizes = padded_sizes(max_num_seqs)
        self.max_model_len = max_model_len
        self.refusals: Counter[str] = Counter()
        self._capture = capture
        self._replays: dict[int, Callable[[], Tensor]] = {}
        self._failed: dict[int, str] = {}
        width = blocks_for(max_model_len, cache.block_size)
        self._buffers = DecodeBuffers.allocate(max_num_seqs, width, cache.device)

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture all sizes, the largest first: the others reuse its memory."""
        for size in tqdm(self.sizes[::-1], desc="capturing CUDA graphs", disable=None, leave=False):
            self._prepare(size)

    @torch.inference_mode()
    def forward(
        self, tokens: list[int], positions: np.ndarray, sequences: tuple[SequenceSlots, ...]
    ) -> Tensor | None:
        """Compute a step in which every sequence brings its next token, and write its K/V.

        Args:
            tokens, positions: one per sequence, in order

        Returns: logits [N, V], valid until the next call; None if the step cannot be replayed.
        """
        reason = self._obstacle(sequences)
        if reason is None:
            size = next(size for size in self.sizes if size >= len(sequences))
            reason = self._prepare(size)
        if reason is not None:
            self.refuse(reason)
            return None
        self._buffers.fill(size, tokens, positions, sequences, self.cache.block_size)
        return self._replays[size]()[: len(sequences)]

    def _obstacle(self, sequences: tuple[SequenceSlots, ...]) -> str | None:
        width = self._buffers.table.shape[1]
        problems = {
            "it has no sequence": not sequences,
            "it has prefill rows": any(seq.query_len != 1 for seq in sequences),
            "heads hold other positions": any(seq.slot_positions is not None for seq in sequences),
            f"it has more than {self.sizes[-1]} sequences": len(sequences) > self.sizes[-1],
            f"a sequence has more than {width} blocks": any(len(seq.block_ids) > width for seq in sequences),
        }
        return next((reason for reason, holds in problems.items() if holds), None)

    def _prepare(self, size: int) -> str | None:
        """Capture the graph of a padded size, once; the reason if that fails. Other sizes are still tried."""
        if size in self._replays or size in self._failed:
            return self._failed.get(size)
        self._buffers.fill(size, [], np.zeros(0, dtype=np.int64), (), self.cache.block_size)
        try:
            self._replays[size] = self._capture(lambda: self._run(size))
        except RuntimeError as error:
            first_line = str(error).strip().splitlines()[:1]
            self._failed[size] = f"its capture failed: {type(error).__name__}: {''.join(first_line)}"
        return self._failed.get(size)

    def _run(self, size: int) -> Tensor:
        """The forward pass over the first rows of the buffers: what is captured."""
        numbers = self._buffers.numbers[:size]
        lengths, shifts = numbers[:, LENGTH].int(), numbers[:, SHIFT].int()
        tables = self.ops.static_tables(
            self._buffers.table[:size],
            lengths,
            shifts,
            num_kv_heads=self.cache.num_kv_heads,
            max_seq_len=self.max_model_len,
        )
        output = self.model(
            input_ids=numbers[:, TOKEN][None].contiguous(),
            position_ids=numbers[:, POSITION][None].contiguous(),
            use_cache=False,
            logits_to_keep=0,
            kv_batch=_ReplayedKVBatch(self.ops, self.cache, numbers[:, SLOT].contiguous(), tables),
        )
        return output.logits[0]

    def refuse(self, reason: str) -> None:
        """Count a step that runs without a graph, and say why the first time."""
        self.refusals[reason] += 1
        if self.refusals[reason] == 1:
            level = logging.WARNING if reason in self._failed.values() else logging.INFO
            logger.log(level, "decode graphs: a step runs without a graph, because %s", reason)


def decode_graphs(
    model: nn.Module, cache: KVCache, backend: Any, config: EngineConfig, groups: LayerGroups
) -> DecodeGraphs | None:
    """The graphs of an engine: on CUDA, for a back-end whose decode can be replayed, unless switched off.
    They are captured now, but for models with windows, which never replay one."""
    if cache.device.type != "cuda" or not hasattr(backend, "static_tables") or config.enforce_eager:
        return None
    assert config.max_model_len is not None, "limits are chosen before the engine is made"
    graphs = DecodeGraphs(
        model,
        cache,
        backend,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        capture=CudaCapture(),
    )
    if not groups.windows:
        graphs.capture()
    return graphs
