"""The engine's end of the disk tier: transfers to the workers, and their results to the memory."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kvreclaim.checks import require
from kvreclaim.config import EngineConfig
from kvreclaim.model.config_fields import config_fields
from kvreclaim.model.loader import LoadedModel
from kvreclaim.model.quantized.layers import products_of
from kvreclaim.offload.plan.transfers import TransferOutcome, Transfers
from kvreclaim.offload.store.jobs import DiskCounters
from kvreclaim.offload.store.jobs import JobOutcome as Ended
from kvreclaim.offload.store.namespace import Namespace, weights_digest
from kvreclaim.offload.store.record import VERSION
from kvreclaim.offload.store.slot_file import SlotFile
from kvreclaim.offload.store.workers import DiskWorkers
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import KVFormat
from kvreclaim.schedule.rates import Rates

KV_SEMANTICS = 1
"""To be raised when a forward pass gives other keys or values for the same weights and tokens."""
LAYOUT = 1
"""To be raised when a back-end lays a block out in another way."""
STATES = "states"
"""The directory of states, within that of blocks."""
CLOSE_S = 5.0
WAIT_S = 0.02
"""Most that a step waits for the disk where it has nothing else to do: new requests come between steps."""


def open_disk(config: EngineConfig, loaded: LoadedModel, form: KVFormat, backend: str) -> SlotFile | None:
    """The file below the host; None without kv_offloading_disk_path. Raises: InvalidArgumentError."""
    if config.kv_offloading_disk_path is None:
        return None
    return SlotFile.open(
        Path(config.kv_offloading_disk_path),
        namespace_of(config, loaded, form, backend),
        bytes_per_block=form.bytes_per_block(loaded.facts.layers, config.block_size),
        block_size=config.block_size,
        size_bytes=size_bytes(config) - state_share_bytes(config, loaded.facts),
        reserved_bytes=share_bytes(config),
    )


def open_states(config: EngineConfig, facts: ModelFacts, blocks: SlotFile | None) -> SlotFile | None:
    """Open the file of states next to that of blocks, in a directory of its own; None for a model without
    recurrent layers. Raises: InvalidArgumentError."""
    if blocks is None or not facts.states:
        return None
    assert config.kv_offloading_disk_path is not None, "the blocks have a file"
    share, needed = state_share_bytes(config, facts), 2 * facts.state_bytes
    require(
        share >= needed,
        f"kv_offloading_disk_size is {config.kv_offloading_disk_size} GiB, and its share for states of "
        f"recurrent layers, kv_offloading_state_fraction {config.kv_offloading_state_fraction}, holds none "
        f"of {facts.state_bytes / 2**20:.1f} MiB; raise either, or leave kv_offloading_disk_path out.",
        "kv_offloading_disk_size",
    )
    fields = blocks.namespace.fields
    return SlotFile.open(
        Path(config.kv_offloading_disk_path, STATES),
        Namespace({**fields, "backend_layout": f"{fields['backend_layout']} states"}),
        bytes_per_block=facts.state_bytes,
        block_size=config.block_size,
        size_bytes=share,
    )


def state_share_bytes(config: EngineConfig, facts: ModelFacts) -> int:
    """Bytes of all files for states behind prefixes."""
    if not facts.states:
        return 0
    return int(config.kv_offloading_state_fraction * (size_bytes(config) - share_bytes(config)))


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
            "config": json.dumps(config_fields(model.config)),
            "model_fingerprint": facts.fingerprint,
            "weights_digest": weights_digest(tensors, torch.get_num_threads()),
            "products": products_of(model),
            "kv_semantics": str(KV_SEMANTICS),
            "dtype": " ".join(dict.fromkeys((str(model.dtype), str(facts.dtype)))),
            "rope": _rope(loaded),
            "kv_format": form.fingerprint,
            "block_size": str(config.block_size),
            "backend_layout": f"{backend} on {facts.device.type} {LAYOUT}"
            + " batch-invariant" * config.batch_invariant,
        }
    )


def _rope(loaded: LoadedModel) -> str:
    """The rotation in the config and the one that probing found."""
    configured = getattr(loaded.model.config, "rope_parameters", None)
    ropes = (layer.rope for layer in loaded.facts.layers)
    found = [None if rope is None else (rope.style, rope.start, rope.inv_freq.tolist()) for rope in ropes]
    return f"{configured} {found}"


class Disk:
    """Copies slots of the host to a file and back in the background. It is closed at the latest when the
    object is deleted or the process ends.

    view:    the bytes of a slot of the host
    chained: whether a record is useful only after the one that it follows
    """

    def __init__(
        self,
        tier: Transfers[Any, Any],
        view: Callable[[int], memoryview],
        file: SlotFile,
        rates: Rates,
        *,
        chained: bool = True,
    ) -> None:
        self.tier, self.view, self.rates = tier, view, rates
        self.file = file
        found = ((each.slot, each.record) for each in file.recover(chained=chained))
        self.num_recovered = self.tier.recover(found)
        self.workers = DiskWorkers(file)
        self._loads: set[int] = set()
        self.close = weakref.finalize(self, self.workers.close, CLOSE_S)

    @property
    def counters(self) -> DiskCounters:
        return self.workers.counters

    def submit(self) -> None:
        """Hand the memory's transfers and resets to the workers."""
        if self.tier.take_reset():
            self.workers.clear()
        for each in self.tier.take_transfers():
            data = self.view(each.host_slot)
            if each.to_disk:
                self.workers.submit_store(each.job_id, each.disk_slot, each.name, data)
            else:
                self._loads.add(each.job_id)
                self.workers.submit_load(each.job_id, each.disk_slot, each.name, data)

    def poll(self) -> None:
        """Finish the memory's transfers that have ended. Waits for nothing."""
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
