"""The parts of an engine, made from its config."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from torch import Tensor

from kvreclaim.compression.config import StatsSource
from kvreclaim.compression.stats import QueryStats
from kvreclaim.config import EngineConfig
from kvreclaim.engine.execute.graphs import decode_graphs
from kvreclaim.engine.execute.recurrent import RecurrentStates
from kvreclaim.engine.execute.runner import ModelRunner
from kvreclaim.engine.extension import Extensions
from kvreclaim.engine.lifecycle.lifecycle import Lifecycle
from kvreclaim.engine.offload.disk import open_disk, open_states, share_bytes
from kvreclaim.engine.offload.offloading import Offload
from kvreclaim.engine.offload.prefixes import make_prefixes
from kvreclaim.engine.offload.snapshot_state import SnapshotStore
from kvreclaim.engine.offload.states import OffloadedStates, StateCopies
from kvreclaim.engine.request.outputs import EngineTotals
from kvreclaim.engine.request.request import Sequence as Seq
from kvreclaim.engine.request.sizing import make_memory, state_slots
from kvreclaim.engine.signals.signals import Signals
from kvreclaim.memory.manager import MemoryManager
from kvreclaim.model.loader import LoadedModel
from kvreclaim.offload.plan.tiered_offload import TieredOffload
from kvreclaim.offload.store.slot_file import SlotFile
from kvreclaim.ops.backend import Backend, Choice, Need, choose_backend
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import KVFormat, kv_format, plain_format
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.ops.key_transform import KeyStats
from kvreclaim.ops.kv_cache import KVCache
from kvreclaim.ops.states import StateStore
from kvreclaim.ops.streamed import StreamedLayers, host_cache
from kvreclaim.schedule import Scheduler
from kvreclaim.schedule.preemption_cost import PreemptionCostModel
from kvreclaim.schedule.rates import Rates

logger = logging.getLogger(__name__)


def admitting(config: EngineConfig, num_blocks: int) -> EngineConfig:
    """The limits of a request: num_blocks of them is what full caches have."""
    return replace(config, num_blocks=num_blocks) if config.full_cache_host_size else config


def full_cache(
    config: EngineConfig, groups: LayerGroups, backend: Backend, form: KVFormat, like: Tensor, num_blocks: int
) -> KVCache:
    """A cache of so many blocks in host memory."""
    layers = groups.facts.layers
    cache = host_cache(backend, layers, num_blocks, config.block_size, like=like, kv_format=form)
    num_bytes = num_blocks * cache.bytes_per_block
    logger.info("full cache in host memory: %d blocks, %.2f GiB", num_blocks, num_bytes / 2**30)
    return cache


def streamed_layers(
    cache: KVCache, groups: LayerGroups, backend: Backend, like: Tensor, totals: EngineTotals
) -> StreamedLayers:
    """Brings the layers of a cache in host memory to the device of `like`; bytes are counted in totals."""
    layers, form, size = groups.facts.layers, cache.format, cache.block_size

    def allocate(num_blocks: int) -> KVCache:
        return backend.allocate(layers[:1], num_blocks, size, like=like, kv_format=form)

    return StreamedLayers(backend, cache, allocate, groups.layers(cache, backend), totals)


def stored_facts(
    loaded: LoadedModel, config: EngineConfig, stats: StatsSource | None
) -> tuple[ModelFacts, KVFormat]:
    """The model's facts and the format, both with transforms of keys where codes are better with them.

    stats: where a calibration of the model has left what it measured; None: there is none
    """
    facts, form = loaded.facts, kv_format(config.kv_cache_dtype, loaded.facts.dtype)
    if form.is_plain:
        return facts, form
    from kvreclaim.model.key_transforms import key_transforms, transforms_digest
    from kvreclaim.ops.transformed_keys import with_key_transforms

    transforms = key_transforms(loaded.model, facts, _key_stats(facts, stats))
    if transforms is None:
        return facts, form
    return with_key_transforms(facts, transforms), replace(form, transform=transforms_digest(transforms))


def _key_stats(facts: ModelFacts, source: StatsSource | None) -> list[KeyStats] | None:
    if source is None:
        return None
    stats = source if isinstance(source, QueryStats) else QueryStats.load(source)
    stats.check_model(facts)
    return stats.keys()


def chosen_backend(config: EngineConfig, loaded: LoadedModel, groups: LayerGroups, form: KVFormat) -> Choice:
    """The kernels for this model, device and format. Raises: InvalidArgumentError."""
    facts = groups.facts
    need = Need(facts.layers, config.block_size, facts.dtype, facts.device, form)
    choice = choose_backend(config.kernels, need)
    groups.check(choice, config)
    if config.kernels == "auto" and choice.backend.NAME == "triton":
        from kvreclaim.ops.triton.flash_trial import with_flash

        need = replace(need, layers=groups.model.layers)
        choice = replace(choice, backend=with_flash(choice.backend, need))
    if config.batch_invariant:
        from kvreclaim.model.batch_invariance import check_batch_invariant

        check_batch_invariant(loaded.model, loaded.name, choice.backend.NAME, loaded.modules)
    if facts.layers[0].softmax.keys is None:
        return choice
    from kvreclaim.ops.transformed_keys import transformed

    return replace(choice, backend=transformed(choice.backend))


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Storage of keys and values.

    cache:  what requests write to; device: where that lies in host memory, the pool of compressed drafts
    stream: where it lies in host memory, brings its layers to the device
    file:   the slot file on disk; state_file: of states of recurrent layers; rates: measured transfer rates
    """

    memory: MemoryManager
    cache: KVCache
    device: KVCache | None
    stream: StreamedLayers | None
    file: SlotFile | None
    state_file: SlotFile | None
    rates: Rates


def make_storage(
    loaded: LoadedModel,
    config: EngineConfig,
    groups: LayerGroups,
    form: KVFormat,
    backend: Backend,
    totals: EngineTotals,
) -> Storage:
    """Block accounting and the bytes behind it, on the device, in host memory, on disk."""
    facts, size = groups.facts, config.block_size
    like = next(loaded.model.parameters()).new_empty(0, dtype=facts.dtype)
    file, rates = open_disk(config, loaded, form, backend.NAME), Rates()
    state_file = open_states(config, loaded.facts, file)
    memory = make_memory(
        config,
        groups.model,
        form.bytes_per_block(facts.layers, size),
        0 if file is None else file.num_slots,
        0 if state_file is None else state_file.num_slots,
        rates,
        enable_prefix_caching=config.enable_prefix_caching,
        fingerprint=f"{facts.fingerprint}/{facts.name}/{facts.dtype}/{form.fingerprint}",
        eviction_policy=config.eviction_policy,
        max_pinned_fraction=config.max_pinned_fraction,
        windows=groups.windows,
        states=state_slots(config, groups.model),
    )

    def allocate(num_blocks: int) -> KVCache:
        return backend.allocate(facts.layers, num_blocks, size, like=like, kv_format=form)

    num_blocks = memory.pool.num_blocks
    if not config.full_cache_host_size:
        return Storage(memory, allocate(num_blocks), None, None, file, state_file, rates)
    assert config.num_blocks is not None, "the engine's limits are set"
    cache = full_cache(config, groups, backend, form, like, num_blocks)
    stream = streamed_layers(cache, groups, backend, like, totals)
    return Storage(memory, cache, allocate(config.num_blocks), stream, file, state_file, rates)


def make_states(loaded: LoadedModel, memory: MemoryManager) -> RecurrentStates | None:
    """None for a model without recurrent layers."""
    if loaded.recurrent is None:
        return None
    assert memory.recurrent is not None, "its facts tell of states"
    num_slots, device = memory.recurrent.sizes.num_slots, loaded.facts.device
    store = StateStore(loaded.facts.states, num_slots, device)
    return RecurrentStates(loaded.recurrent, store, memory.recurrent)


def make_host_states(
    storage: Storage, states: RecurrentStates | None, tiers: Offload | None
) -> OffloadedStates | None:
    """None where no states go to the host."""
    if states is None or tiers is None or tiers.below.states is None:
        return None
    tables, on_host = storage.memory.full.tables, tiers.below.states
    offloaded = OffloadedStates(tables, states.group, on_host, states.store)
    tiers.keep_states(offloaded, storage.state_file)
    return offloaded


def make_offload(
    storage: Storage, signals: Signals, preemption: PreemptionCostModel, totals: EngineTotals
) -> Offload | None:
    """None where the memory has no host slots."""
    memory = storage.memory
    if not isinstance(memory.offload, TieredOffload):
        return None
    return Offload(memory, memory.offload, storage.cache, signals, preemption, storage.file, totals)


def keeps_snapshots_on_disk(config: EngineConfig, storage: Storage, scheduler: Scheduler[Seq]) -> bool:
    """Return whether compressed prefixes get files, and are found again by the next engine."""
    return storage.file is not None and bool(share_bytes(config) and scheduler.snapshots.max_blocks)


def make_snapshots(
    config: EngineConfig,
    storage: Storage,
    lifecycle: Lifecycle,
    offload: Offload | None,
    states: StateCopies | None,
) -> SnapshotStore:
    """Keeps compressed prefixes, on the host and on disk, too, where these are there."""
    parking, moves = (None, None) if offload is None else (offload.parking, offload.moves)
    snapshots = SnapshotStore(
        lifecycle.scheduler, lifecycle.signals, lifecycle.new_id, parking, moves, states
    )
    if offload is not None and keeps_snapshots_on_disk(config, storage, lifecycle.scheduler):
        assert storage.file is not None, "there is a file"
        namespace = storage.file.namespace
        prefixes = make_prefixes(config, snapshots, offload.parking, offload.moves, namespace)
        snapshots.keep_files(prefixes)
        offload.keep_files(prefixes)
    return snapshots


def make_runner(
    loaded: LoadedModel,
    config: EngineConfig,
    groups: LayerGroups,
    storage: Storage,
    backend: Backend,
    signals: Signals,
    extensions: Extensions,
) -> ModelRunner:
    """Computes what requests schedule."""
    memory, cache, stream = storage.memory, storage.cache, storage.stream
    has_graphs = stream is None and loaded.recurrent is None  # states have slots that change in each step
    graphs = decode_graphs(loaded.model, cache, backend, config, groups) if has_graphs else None
    return ModelRunner(
        loaded,
        groups,
        memory,
        cache,
        backend,
        signals,
        stream,
        graphs=graphs,
        extensions=extensions,
        is_batch_invariant=config.batch_invariant,
    )


def describe(
    loaded: LoadedModel, groups: LayerGroups, form: KVFormat, choice: Choice, extensions: Extensions
) -> str:
    """The line that the engine logs at its start."""
    windows = "" if groups.parts == 1 else f", windows {plain_format(loaded.facts.dtype).name}"
    kernels = f"{choice.describe()}; {loaded.modules}; KV {form.name}{windows}"
    return "; ".join(filter(None, [kernels, *(each.describe() for each in extensions.ordered)]))


def make_scheduler(
    config: EngineConfig, memory: MemoryManager, preemption: PreemptionCostModel
) -> Scheduler[Seq]:
    """Return the scheduler that a config selects."""
    return Scheduler(
        memory,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        policy=config.scheduling_policy,
        preemption=preemption,
        preemption_victim=config.preemption_victim,
        max_snapshot_blocks=int(config.prefix_snapshot_fraction * memory.pool.num_blocks),
    )
