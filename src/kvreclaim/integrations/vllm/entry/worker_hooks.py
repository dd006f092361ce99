"""Hooks of our workers in vLLM's: the check at start, the passes, their figures."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.entry.centring import CentringHooks
from kvreclaim.integrations.vllm.entry.facts import describe, plain_facts
from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.refusals.loaded import refuse_groups, refuse_layers, refuse_unnamed_groups
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.groups import layer_kinds
from kvreclaim.integrations.vllm.settings.layer_needs import signal_bytes
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.applier import Applier
from kvreclaim.integrations.vllm.worker.cells.heads import HeadTables
from kvreclaim.integrations.vllm.worker.cells.limits import TableLimits, refuse_wide_tables, table_bytes
from kvreclaim.integrations.vllm.worker.cells.positions import PassTrace, Positions
from kvreclaim.integrations.vllm.worker.centred_layer import transform_of
from kvreclaim.integrations.vllm.worker.layouts import CacheViews
from kvreclaim.ops.scoring import MAX_LOGITS

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.v0_32 import attention, cells_side, probing, worker_side
else:
    sides = ("attention", "cells", "probing", "worker")
    attention, cells_side, probing, worker_side = map(family.module, sides)

logger = logging.getLogger("vllm.kvreclaim")

SAFETY = 1.25
"""Over the sum below: the allocator's rounding."""
MAX_OFFSETS = 17
"""Most offsets of any policy's usual options: 2^0 to 2^16."""


class WorkerHooks(CentringHooks):
    """Mixin of a vLLM worker. Every hook calls vLLM's own method first."""

    reclaim: Applier | None = None

    def init_device(self) -> None:
        """Raises: UnsupportedVllmError if this vLLM's runner is not the one that we were written for."""
        worker: Any = self
        cells_side.register_cells(Options.of_config(worker.vllm_config).has_cells)
        super().init_device()  # type: ignore[misc]
        signatures.check_worker(worker.model_runner)

    def determine_available_memory(self) -> int:
        """Subtract on a GPU what vLLM's profile does not include: a pass's temporary memory, the tables of
        unequal heads, and the second set of CUDA graphs for them. A pool size that the operator has set is
        unchanged. Raises: InvalidArgumentError if the tables are too large."""
        available = int(super().determine_available_memory())  # type: ignore[misc]
        worker: Any = self
        if worker.device.type == "cpu" or worker.cache_config.kv_cache_memory_bytes:
            return available
        scratch = _scratch(worker)
        if Options.of_config(worker.vllm_config).has_cells:
            tables = _tables(worker)
            refuse_wide_tables(tables, available)
            scratch += tables + worker.cudagraph_memory_estimate
        left = max(0, available - scratch)
        return left - _kept_signals(worker, left)

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Raises: UnsupportedModelError, UnsupportedVllmError, InvalidArgumentError, StatsMismatchError."""
        super().initialize_from_config(kv_cache_config)  # type: ignore[misc]
        worker: Any = self
        runner = worker.model_runner
        refuse_groups(runner.kv_cache_config)
        refuse_unnamed_groups(worker.vllm_config, runner.kv_cache_config)
        layers = probing.attention_layers(runner)
        refuse_layers({layer.layer_name: layer for layer in layers})
        signatures.check_layers(layers)
        with torch.inference_mode():
            views = CacheViews(attention.layer_caches(runner), attention.num_blocks(runner))
            views.prove()
        options = Options.of_config(worker.vllm_config)
        known = describe(runner, options)
        heads = _heads(worker, views) if options.has_cells else None
        rows = worker_side.rows_of(runner, heads)
        views = views.restoring([transform_of(layer) for layer in layers])
        make = self._kind(options, rows)
        most = _most_tokens(worker)
        self.reclaim = make(options, known.facts, known.stats, views, rows, heads, most)
        worker_side.adopt(runner, self.reclaim)
        if worker.device.type != "cpu":
            self.reclaim.rehearse()

    def _kind(self, options: Options, rows: Any) -> Callable[..., Applier]:
        """Return the class of applier that this engine's options need."""
        worker: Any = self
        if options.snapshots:
            from kvreclaim.integrations.vllm.worker.kept_states import SnapshotApplier

            return SnapshotApplier
        if options.watched:
            from kvreclaim.integrations.vllm.worker.signal_applier import SignalApplier

            watch = family.module("signals").watch_layers(worker.model_runner, options.watched)
            return partial(SignalApplier, watch)
        if worker.vllm_config.speculative_config is None:
            return Applier
        with torch.inference_mode():
            found = family.module("drafter").adopt_drafter(worker.model_runner, rows)
        if found is None:
            return Applier
        from kvreclaim.integrations.vllm.worker.drafter import DraftedApplier, DrafterApplier

        facts = plain_facts(found.config, worker.model_runner.device, found.layers)
        return partial(DraftedApplier, DrafterApplier(options, facts, found.views, rows))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Return vLLM's output with the seconds of passes."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        applier = self.reclaim
        if applier is not None and (carrier := worker_side.carrier(output)) is not None:
            seconds = applier.take_seconds()
            if seconds is not None:
                carrier.kvreclaim = seconds
        return output

    def kvreclaim_trace(self, on: bool) -> None:
        """Start or stop recording the positions that passes keep, for requests without a pass so far."""
        applier = self._applier()
        applier.trace = PassTrace(Positions(applier.shape, torch.device("cpu"))) if on else None

    def kvreclaim_take_trace(self) -> list[tuple[str, int, torch.Tensor]]:
        """(request, position of the next query, positions kept [L, K, keep] int32) of every pass since the
        last call, of this worker's heads; [] while nothing is recorded."""
        trace = self._applier().trace
        return [] if trace is None else trace.take()

    def kvreclaim_figures(self) -> dict[str, float]:
        """Return this worker's totals since the start."""
        return asdict(self._applier().figures)

    def _applier(self) -> Applier:
        assert self.reclaim is not None, "called before the cache is made"
        return self.reclaim


def _heads(worker: Any, views: CacheViews) -> HeadTables | None:
    """Tables of unequal heads; None, logged once, where attention over cells fails its self-test: heads then
    keep equally many tokens, by the same ranking and in as many blocks."""
    try:
        with torch.inference_mode():
            limits = None if worker.device.type == "cpu" else _limits(worker)
            return cells_side.adopt_cells(worker.model_runner, views, limits)
    except UnsupportedModelError as reason:
        logger.warning(
            "heads keep equally many tokens here, chosen by the same ranking: %s. Policies whose heads keep "
            "unequal numbers do better elsewhere; another --attention-backend may serve them.",
            reason,
        )
        return None


def _most_tokens(worker: Any) -> int:
    """Return as many tokens as a request ever holds here. What it hits in the prefix cache is not bounded by
    its budget."""
    config, longest = worker.vllm_config, worker.model_config.max_model_len
    chunk = config.scheduler_config.max_num_batched_tokens
    bound = Options.of_config(config).bound(worker.cache_config.block_size, chunk)
    if bound is None or worker.cache_config.enable_prefix_caching:
        return int(longest)
    return min(bound, longest)


def _limits(worker: Any) -> TableLimits:
    config, block_size = worker.vllm_config, worker.cache_config.block_size
    options = Options.of_config(config)
    return TableLimits.of(
        budget=options.settings.in_blocks(block_size).budget,
        most_tokens=options.bound(block_size, config.scheduler_config.max_num_batched_tokens),
        max_model_len=worker.model_config.max_model_len,
    )


def _tables(worker: Any) -> int:
    """Bytes of the tables of unequal heads."""
    return table_bytes(
        num_layers=_compressed_layers(worker),
        num_kv_heads=worker.model_config.get_num_kv_heads(worker.parallel_config),
        num_tokens=_limits(worker).tokens,
        block_size=worker.cache_config.block_size,
        num_rows=worker.vllm_config.scheduler_config.max_num_seqs,
    )


def _compressed_layers(worker: Any) -> int:
    kinds = layer_kinds(worker.model_config)
    return int(worker.model_config.get_num_layers(worker.parallel_config)) if kinds is None else kinds.full


def _scratch(worker: Any) -> int:
    """Bytes of passes over _most_tokens."""
    model = worker.model_config
    return scratch_bytes(
        num_layers=_compressed_layers(worker),
        num_heads=model.get_num_attention_heads(worker.parallel_config),
        num_kv_heads=model.get_num_kv_heads(worker.parallel_config),
        head_dim=model.get_head_size(),
        num_tokens=_most_tokens(worker),
        num_queries=Options.of_config(worker.vllm_config).settings.make_policy().query_window,
    )


def _kept_signals(worker: Any, available: int) -> int:
    """Return the bytes that hooks on layers keep, of those available for the pool."""
    config, model, parallel = worker.vllm_config, worker.model_config, worker.parallel_config
    return signal_bytes(
        Options.of_config(config).settings.make_policy(),
        worker.cache_config.block_size,
        available,
        num_heads=model.get_num_layers(parallel) * model.get_num_attention_heads(parallel),
        head_bytes=model.get_head_size() * model.dtype.itemsize,
        num_rows=config.scheduler_config.max_num_seqs,
    )


def scratch_bytes(
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
    num_queries: int = 0,
) -> int:
    """Return the peak bytes of compressing num_tokens live tokens on one worker, without the cache.

    Scoring a layer: three copies of a batch of logits; keys, values and the keys' squares in fp32. Choosing:
    the scores of all layers, once more without the protected tokens, their order and indices. Moving is less.
    """
    logits = max(MAX_LOGITS, num_heads * max(MAX_OFFSETS, num_queries) * num_tokens)
    layer = 4 * num_kv_heads * num_tokens * head_dim
    scores = num_layers * num_kv_heads * num_tokens
    return int(SAFETY * (3 * 4 * logits + 4 * layer + 40 * scores))
