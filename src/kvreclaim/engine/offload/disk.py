"""The engine's end of the disk tier: transfers to the workers, and their results to the memory."""

from __future__ import annotations

import weakref
from pathlib import Path

import torch

from kvreclaim.config import EngineConfig
from kvreclaim.engine.offload.stats import DiskStats, SlotStats
from kvreclaim.memory.tiers.disk import TransferOutcome
from kvreclaim.memory.tiers.tiered_offload import TieredOffload
from kvreclaim.model.loader import LoadedModel
from kvreclaim.ops.formats import KVFormat
from kvreclaim.schedule.rates import Rates
from kvreclaim.tiers.host import HostSlots
from kvreclaim.tiers.jobs import DiskCounters
from kvreclaim.tiers.jobs import JobOutcome as Ended
from kvreclaim.tiers.namespace import Namespace, weights_digest
from kvreclaim.tiers.record import VERSION
from kvreclaim.tiers.slot_file import SlotFile
from kvreclaim.tiers.workers import DiskWorkers

KV_SEMANTICS = 1
"""To be raised when a forward pass gives other keys or values for the same weights and tokens."""
LAYOUT = 1
"""To be raised when a back-end lays a block out in another way."""
CLOSE_S = 5.0
WAIT_S = 0.02
"""Most that a step waits for the disk where it has nothing else to do: new requests come between steps."""


def open_disk(config: EngineConfig, loaded: LoadedModel, form: KVFormat, backend: str) -> SlotFile | None:
    """The file below the host, where one is asked for. Raises: InvalidArgumentError."""
    if config.kv_offloading_disk_path is None:
        return None
    return SlotFile.open(
        Path(config.kv_offloading_disk_path),
        namespace_of(config, loaded, form, backend),
        bytes_per_block=form.bytes_per_block(loaded.facts.layers, config.block_size),
        block_size=config.block_size,
        size_bytes=size_bytes(config),
        reserved_bytes=share_bytes(config),
    )


def size_bytes(config: EngineConfig) -> int:
    """Bytes of all files in the directory."""
    return int(config.kv_offloading_disk_size * 2**30)


def share_bytes(config: EngineConfig) -> int:
    """Bytes of these for compressed prefixes: half at most, or there would be none for blocks."""
    return int(min(0.5, config.prefix_snapshot_fraction) * size_bytes(config))


def namespace_of(config: EngineConfig, loaded: LoadedModel, form: KVFormat, backend: str) -> Namespace:
    """The namespace: all that the bytes of this engine's blocks depend on. Reads all weights."""
    facts, model = loaded.facts, loaded.model
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return Namespace(
        {
            "record_version": str(VERSION),
            "model_fingerprint": facts.fingerprint,
            "weights_digest": weights_digest(tensors, torch.get_num_threads()),
            "kv_semantics": str(KV_SEMANTICS),
            "dtype": str(facts.dtype),
            "rope": _rope(loaded),
            "kv_format": form.fingerprint,
            "block_size": str(config.block_size),
            "backend_layout": f"{backend} {LAYOUT}",
        }
    )


def _rope(loaded: LoadedModel) -> str:
    """The rotation in the config and the one that probing found."""
    asked = getattr(loaded.model.config, "rope_parameters", None)
    ropes = (layer.rope for layer in loaded.facts.layers)
    found = [None if rope is None else (rope.style, rope.start, rope.inv_freq.tolist()) for rope in ropes]
    return f"{asked} {found}"


class Disk:
    """Moves blocks between host slots and the file while the engine goes on. close: at the latest when the
    object goes or the process ends."""

    def __init__(self, offload: TieredOffload, slots: HostSlots, file: SlotFile, rates: Rates) -> None:
        assert offload.disk is not None, "there is a file, so there is a tier"
        self.tier, self.slots, self.rates = offload.disk, slots, rates
        self.file = file
        found = ((each.slot, each.record) for each in file.recover())
        self.num_recovered = self.tier.recover(found)
        self.workers = DiskWorkers(file)
        self._loads: set[int] = set()
        self.close = weakref.finalize(self, self.workers.close, CLOSE_S)

    @property
    def counters(self) -> DiskCounters:
        return self.workers.counters

    def stats(self) -> DiskStats:
        tier = self.tier
        return DiskStats(
            slots=SlotStats.of(tier.tier.pool),
            counters=self.counters,
            recovered=self.num_recovered,
            blocks_loaded=tier.num_loaded,
            blocks_stored=tier.num_stored,
            gone=tier.num_gone,
            failed=tier.num_failed,
            refused=tier.num_unstored,
            loading=tier.num_loading,
            storing=tier.num_storing,
        )

    def submit(self) -> None:
        """Hand over what the memory wants moved or forgotten."""
        if self.tier.take_reset():
            self.workers.clear()
        for each in self.tier.take_transfers():
            data = self.slots.view(each.host_slot)
            if each.to_disk:
                self.workers.submit_store(each.job_id, each.disk_slot, each.name, data)
            else:
                self._loads.add(each.job_id)
                self.workers.submit_load(each.job_id, each.disk_slot, each.name, data)

    def poll(self) -> None:
        """Tell the memory what has ended. Waits for nothing."""
        if self._loads:
            self.workers.overdue()
        for done in self.workers.poll():
            is_load = done.job_id in self._loads
            self._loads.discard(done.job_id)
            outcome = TransferOutcome.OK if done.outcome is Ended.OK else TransferOutcome.FAILED
            if is_load and done.outcome.is_corrupt:
                outcome = TransferOutcome.GONE
            if is_load and outcome is TransferOutcome.OK:
                self.rates.note("disk_in_s", done.seconds, done.num_bytes)
            self.tier.finish(done.job_id, outcome)

    def wait(self) -> None:
        """Until something has ended, or for a moment."""
        self.workers.wait(WAIT_S)
