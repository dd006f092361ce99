"""An image as facts and tensors, which a session file takes, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvreclaim.engine.offload.image import Image, SideState
from kvreclaim.engine.request.compression_state import CompressionState
from kvreclaim.engine.signals.signals import ParkedSignals
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.ops.blocks_io import bytes_per_block
from kvreclaim.ops.cell_tables import CellTable
from kvreclaim.ops.head_rows import HeadRows
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.schedule.budget.account import EvictionCounters
from kvreclaim.schedule.snapshot_key import SnapshotKey

KIND = "compressed"


class UnfitError(ValueError):
    """A record that this engine can't take."""


def key_facts(key: SnapshotKey) -> dict[str, Any]:
    """Facts of a key in a record; the tokens themselves are a tensor."""
    return {
        "kind": KIND,
        "salt": key.salt_uid,
        "recipe": key.recipe,
        "num_tokens": key.num_tokens,
        "has_past": key.has_past,
    }


def record_of(image: Image, key: SnapshotKey, cache: KVCache) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Facts for JSON, and tensors on the host that do not change any more."""
    state, aside = image.state, image.aside
    facts = key_facts(key) | {
        "physical_len": image.physical_len,
        "exact_len": image.exact_len,
        "account": asdict(image.account),
        "rounded": state.rounded,
        "first_queries": {str(window): first for window, (first, _) in aside.signals.queries.items()},
    }
    found: dict[str, Tensor | None] = {
        "tokens": torch.frombuffer(bytearray(key.tokens), dtype=torch.int64),
        "blocks": image.blocks,
        "beside": image.beside,
        "recurrent": image.recurrent,
        "mass": aside.signals.mass,
        "slot_positions": state.slot_positions,
    }
    found |= {f"queries.{window}": kept for window, (_, kept) in aside.signals.queries.items()}
    if (cells := state.cells) is not None:
        facts["cell_blocks"] = cells.num_blocks
        found["cells.table"] = torch.from_numpy(_counted(cells.table, cache, cells.num_blocks))
        found["cells.counts"] = torch.from_numpy(cells.counts.astype(np.int64))
        found["cells.prompt_slots"] = torch.from_numpy(cells.prompt_slots.astype(np.int64))
    if state.head_positions is not None:
        found["heads.counts"] = torch.from_numpy(state.head_positions.counts)
        found["heads.positions"] = state.head_positions.flat
    return facts, {name: tensor.cpu() for name, tensor in found.items() if tensor is not None}


def image_from(
    facts: Mapping[str, Any], tensors: Mapping[str, Tensor], cache: KVCache, state_bytes: int
) -> Image:
    """state_bytes: of recurrent layers; 0: the model has none. Raises: UnfitError for what no record_of an
    engine with such a cache would give."""
    try:
        return _Reading(facts, tensors, cache, state_bytes).image()
    except (KeyError, TypeError, IndexError, ValueError, RuntimeError, OverflowError) as error:
        raise UnfitError(f"{type(error).__name__}: {error}") from error


class _Reading:
    def __init__(
        self, facts: Mapping[str, Any], tensors: Mapping[str, Tensor], cache: KVCache, state_bytes: int
    ) -> None:
        self.facts, self.tensors, self.cache, self.state_bytes = facts, tensors, cache, state_bytes
        self.per_head = (cache.num_layers, cache.num_kv_heads)

    def image(self) -> Image:
        facts = self.facts
        physical, exact = int(facts["physical_len"]), int(facts["exact_len"])
        logical, num_blocks = int(facts["num_tokens"]), blocks_for(physical, self.cache.block_size)
        _require(0 <= exact <= physical <= logical and physical > 0, "lengths")
        _require(num_blocks <= self.cache.num_blocks, "blocks")
        blocks = self._of("blocks", torch.uint8, (num_blocks, bytes_per_block(self.cache.planes)))
        _require(blocks is not None, "blocks")
        assert blocks is not None, "just looked at"
        recurrent = self._of("recurrent", torch.uint8, (self.state_bytes,))
        _require((recurrent is None) == (not self.state_bytes), "recurrent state")
        account = EvictionCounters(**{name: int(value) for name, value in facts["account"].items()})
        return Image(
            logical,
            physical,
            exact,
            account,
            self._state(num_blocks),
            SideState(self._signals(physical), list(range(num_blocks))),
            blocks,
            self._of("beside", torch.uint8, (num_blocks, None)),
            recurrent,
        )

    def _state(self, num_blocks: int) -> CompressionState:
        positions = self._of("slot_positions", torch.int32, (*self.per_head, None))
        _require(positions is None or positions.shape[-1] <= num_blocks * self.cache.block_size, "slots")
        cells, heads = self._cells(num_blocks), None
        counts = self._of("heads.counts", torch.int64, self.per_head)
        if counts is not None:
            flat = self._of("heads.positions", torch.int32, (int(counts.sum()),))
            assert flat is not None, "it comes with the counts"
            heads = HeadRows(flat.to(self.cache.device), counts.numpy())
        return CompressionState(positions, cells, heads, int(self.facts["rounded"]))

    def _cells(self, num_blocks: int) -> CellTable | None:
        table = self._of("cells.table", torch.int32, (*self.per_head, None))
        if table is None:
            return None
        held = int(self.facts["cell_blocks"])
        limit = self.cache.num_layers * held * self.cache.num_kv_heads
        _require(held <= num_blocks and bool(((table >= 0) & (table < limit)).all()), "cells")
        counts, prompt_slots = (
            self._of(f"cells.{name}", torch.int64, self.per_head) for name in ("counts", "prompt_slots")
        )
        assert counts is not None, "they come with the table"
        assert prompt_slots is not None, "they come with the table"
        _require(int(counts.max()) <= table.shape[-1] and int(counts.sum()) == limit, "cells")
        named = _named(table.numpy(), self.cache, held)
        return CellTable(named, counts.numpy(), held, prompt_slots.numpy())

    def _signals(self, physical: int) -> ParkedSignals:
        queries = {}
        for window, first in self.facts["first_queries"].items():
            rows = self._of(f"queries.{window}", None, (self.cache.num_layers, int(window), None, None))
            assert rows is not None, "they come with the first"
            queries[int(window)] = int(first), rows
        return ParkedSignals(queries, self._of("mass", torch.float32, (*self.per_head, physical)))

    def _of(self, name: str, dtype: torch.dtype | None, shape: tuple[int | None, ...]) -> Tensor | None:
        tensor = self.tensors.get(name)
        if tensor is not None:
            fits = tensor.dim() == len(shape) and all(
                size in (None, found) for size, found in zip(shape, tensor.shape, strict=True)
            )
            _require(fits and dtype in (None, tensor.dtype), f"{name} {tuple(tensor.shape)}")
        return tensor


def _require(condition: object, what: str) -> None:
    if not condition:
        raise UnfitError(f"its {what} do not fit")


def _counted(table: np.ndarray, cache: KVCache, num_blocks: int) -> np.ndarray:
    """Cells of a cache of so many blocks, whatever this one has."""
    heads = cache.num_kv_heads
    layer, rest = np.divmod(table.astype(np.int64), cache.num_blocks * heads)
    return (layer * num_blocks * heads + rest).astype(np.int32)


def _named(table: np.ndarray, cache: KVCache, num_blocks: int) -> np.ndarray:
    """The inverse of _counted."""
    heads = cache.num_kv_heads
    layer, rest = np.divmod(table.astype(np.int64), num_blocks * heads)
    return (layer * cache.num_blocks * heads + rest).astype(np.int32)
