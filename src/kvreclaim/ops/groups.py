"""Groups of a model's layers that share block tables.

A block of the pool holds a block of tokens in every layer with full attention. Layers with sliding windows
form groups of the same number of layers (the last group may have fewer), each with its own tables over blocks
of the same pool: such a block holds a block of tokens in the layers of one group. Layers that attend
within chunks are windows, too: their tables begin at the chunk's first token.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvreclaim.checks import require
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError, UnsupportedModelError
from kvreclaim.memory.windows import ChunkedWindow, Place, Window, grouping
from kvreclaim.ops.backend import Backend, Choice, Need
from kvreclaim.ops.facts import ModelFacts, Softmax
from kvreclaim.ops.formats import kv_format
from kvreclaim.ops.formats.format import plain_format
from kvreclaim.ops.kv_cache import KVCache, LayerCache

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class LayerGroups:
    """model:   all layers
    facts:   of those with full attention, which compression is about; of all where all share one table
    windows: of the others
    places:  of every layer of the model
    trailing: the widest window where no layer has full attention
    parts:   blocks that hold a block of tokens in a group of windows: several where these keep the model's
             dtype in blocks of codes, each of them as many tokens as its bytes hold
    """

    model: ModelFacts
    facts: ModelFacts
    windows: tuple[Window, ...]
    places: tuple[Place, ...]
    trailing: Window | None = None
    parts: int = 1

    @property
    def tables(self) -> tuple[tuple[int, int], ...]:
        """Window of each table but the first, and the table's number among the window's groups."""
        return tuple((n, i) for n, window in enumerate(self.windows) for i in range(self.num_groups(window)))

    def num_groups(self, window: Window) -> int:
        """Tables of one window."""
        return window.num_blocks // self.parts

    def layers(self, cache: KVCache, ops: Backend) -> tuple[LayerCache, ...]:
        """Every layer of the model as it attends over this cache; the cache's layers are those of `facts`."""
        others = cache
        if self.parts > 1:
            others = ops.plain_view(cache, plain_format(self.model.dtype), cache.block_size // self.parts)
        return tuple(
            replace((others if place.table else cache).layers[place.layer], softmax=layer.softmax)
            for place, layer in zip(self.places, self.model.layers, strict=True)
        )

    def check(self, choice: Choice, config: EngineConfig) -> None:
        """Raises: InvalidArgumentError if the back-end does not serve blocks of as few tokens as windows in
        the model's dtype have."""
        ops, size = choice.backend, config.block_size // self.parts
        if self.parts == 1:
            return
        form = plain_format(self.model.dtype)
        if reason := ops.unsupported_reason(
            Need(self.facts.layers, size, self.model.dtype, self.model.device, form)
        ):
            raise InvalidArgumentError(
                f"kv_cache_dtype_skip_layers keeps {form.name} in windows, and of that a block of "
                f"{config.block_size} tokens in {config.kv_cache_dtype} holds {size}, which {ops.NAME} "
                f"kernels do not serve ({reason}); set block_size to {16 * self.parts}, or leave it out.",
                field="kv_cache_dtype_skip_layers",
            )


def layer_groups(model: ModelFacts, config: EngineConfig) -> LayerGroups:
    """Return groups if the model has windows and full attention, unless an option excludes them.

    Raises: InvalidArgumentError if groups are requested or needed, but not possible; UnsupportedModelError if
        a model with chunks has no layer with full attention.
    """
    windows = [_window(layer.softmax) for layer in model.layers]
    widest = max((window.num_tokens for window in windows if window is not None), default=None)
    together = LayerGroups(model, model, (), tuple(Place(0, n) for n in range(model.num_layers)))
    parts = _parts(model, config)
    if chunk := next((window for window in windows if isinstance(window, ChunkedWindow)), None):
        _check_chunks(chunk, windows, model, config)
    if widest is None or config.disable_hybrid_kv_cache_manager:
        _check_not_skipped(config, "share one block table")
        return together
    if config.kv_offloading_size:
        why_not = "kv_offloading_size is set, and windows have no places in host memory"
        if config.disable_hybrid_kv_cache_manager is False:
            raise InvalidArgumentError(
                f"disable_hybrid_kv_cache_manager is False, but {why_not}; leave one of them out.",
                field="disable_hybrid_kv_cache_manager",
            )
        _check_not_skipped(config, f"share one block table ({why_not})")
        logger.warning("layers with sliding windows hold all tokens: %s", why_not)
        return together
    found = grouping(windows)
    if found is None:
        _check_not_skipped(config, "have windows")
        return replace(together, trailing=Window(widest))
    tables = tuple(replace(window, num_blocks=window.num_blocks * parts) for window in found.windows)
    return LayerGroups(model, model.of_layers(found.full), tables, found.places, parts=parts)


def _check_not_skipped(config: EngineConfig, what: str) -> None:
    require(
        not config.kv_cache_dtype_skip_layers,
        f"kv_cache_dtype_skip_layers is sliding_window, but all layers {what}; leave it out.",
        "kv_cache_dtype_skip_layers",
    )


def _parts(model: ModelFacts, config: EngineConfig) -> int:
    """Number of parts of LayerGroups."""
    if not config.kv_cache_dtype_skip_layers:
        return 1
    form, plain = kv_format(config.kv_cache_dtype, model.dtype), plain_format(model.dtype)
    require(
        not form.is_plain,
        f"kv_cache_dtype_skip_layers is sliding_window, but kv_cache_dtype is {form.name}, beside which no "
        "other is kept; set fp8_e4m3, int8, int4 or turboquant4, or leave it out.",
        "kv_cache_dtype_skip_layers",
    )
    require(
        form.keys.bits == form.values.bits,
        f"kv_cache_dtype_skip_layers is sliding_window, but in kv_cache_dtype {form.name} numbers of keys "
        "and values differ in size; set fp8_e4m3, int8, int4 or turboquant4, or leave it out.",
        "kv_cache_dtype_skip_layers",
    )
    parts = plain.keys.bits // form.keys.bits
    require(
        config.block_size % parts == 0,
        f"kv_cache_dtype_skip_layers keeps {plain.name} in windows, {parts} times the bytes of {form.name}, "
        f"but block_size is {config.block_size}; set a multiple of {parts}.",
        "kv_cache_dtype_skip_layers",
    )
    return parts


def _window(softmax: Softmax) -> Window | None:
    if softmax.chunk is not None:
        return ChunkedWindow(softmax.chunk)
    return None if softmax.window is None else Window(softmax.window)


def _check_chunks(
    chunk: ChunkedWindow, windows: Sequence[Window | None], model: ModelFacts, config: EngineConfig
) -> None:
    """Chunks need tables of their own, which begin where a chunk does."""
    what = f"layers of {model.name!r} attend within {chunk} tokens"
    if None not in windows:
        raise UnsupportedModelError(
            f"{what}, and none has full attention; use a model that has such layers beside them."
        )
    if chunk.num_tokens % config.block_size:
        raise InvalidArgumentError(
            f"block_size is {config.block_size}, but {what}; it has to divide them.", field="block_size"
        )
    if config.disable_hybrid_kv_cache_manager:
        raise InvalidArgumentError(
            f"disable_hybrid_kv_cache_manager is True, but {what}, which takes tables of their own; "
            "leave it out.",
            field="disable_hybrid_kv_cache_manager",
        )
    if config.kv_offloading_size:
        raise InvalidArgumentError(
            f"kv_offloading_size is {config.kv_offloading_size:g}, but {what}, and their tables have no "
            "places in host memory; leave it out.",
            field="kv_offloading_size",
        )
