"""Native offloading on a CPU: vLLM's OffloadingConnector and its manager, with copies in host memory in place
of CUDA's. Transfers run as late as the connector allows, so that too early a write shows.

>>> engine = Engine(model, compression=..., kv_transfer_config=offloading())
>>> worker = worker_of(engine.scheduler.connector, get_kv_transfer_group())
>>> worker.stored()  # {key of a block: its bytes in all layers}
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import CanonicalKVCaches, GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

LATE = 3
"""Steps that a transfer takes unless wait() is called."""


def offloading(**more: Any) -> dict[str, Any]:
    """A --kv-transfer-config that names this module."""
    extra = {"spec_name": "HostSpec", "spec_module_path": __name__, "cpu_bytes_to_use": 1 << 28, **more}
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


def worker_of(scheduler: Any, worker: Any) -> HostWorker:
    """The offloading worker of an OffloadingConnector, by its sides in the scheduler and in the worker."""
    found: HostWorker = worker.connector_worker.worker
    found.places = scheduler.connector_scheduler.manager.places
    return found


class HostManager(CPUOffloadingManager):
    """places: chunk of each key that was stored."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.places: dict[Any, int] = {}

    def prepare_store(self, keys: Any, req_context: Any) -> Any:
        found = super().prepare_store(keys, req_context)
        if found is not None:
            self.places.update(zip(found.keys_to_store, found.store_spec.block_ids.tolist(), strict=True))
        return found


class HostWorker(OffloadingWorker):
    """counts: blocks stored and loaded."""

    def __init__(self, caches: CanonicalKVCaches, num_chunks: int) -> None:
        self.caches = [cache.tensor for cache in caches.tensors]
        self.host = [cache.new_zeros((num_chunks, cache.shape[1])) for cache in self.caches]
        self.pending: dict[int, tuple[int, Any, Any, bool]] = {}
        self.done: list[int] = []
        self.counts = {"stored": 0, "loaded": 0}
        self.places: dict[Any, int] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        self.pending[job_id] = (LATE, src_spec.block_ids, dst_spec.block_ids, True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        blocks = dst_spec.block_ids
        self.pending[job_id] = (LATE, blocks, src_spec.block_ids[: len(blocks)], False)
        return True

    def get_finished(self) -> list[TransferResult]:
        for job_id, (left, *rest) in list(self.pending.items()):
            self.pending[job_id] = (left - 1, *rest)
            if left == 1:
                self._run(job_id)
        done, self.done = self.done, []
        return [TransferResult(job_id, True) for job_id in done]

    def wait(self, job_ids: set[int]) -> None:
        for job_id in sorted(job_ids & self.pending.keys()):
            self._run(job_id)

    def stored(self) -> dict[Any, torch.Tensor]:
        """Stored blocks by key; no transfer is left under way."""
        self.wait(set(self.pending))
        return {key: torch.cat([host[place] for host in self.host]) for key, place in self.places.items()}

    def _run(self, job_id: int) -> None:
        _, blocks, chunks, is_store = self.pending.pop(job_id)
        ours, theirs = torch.from_numpy(blocks).long(), torch.from_numpy(chunks).long()
        for cache, host in zip(self.caches, self.host, strict=True):
            if is_store:
                host[theirs] = cache[ours]
            else:
                cache[ours] = host[theirs]
        self.counts["stored" if is_store else "loaded"] += len(ours)
        self.done.append(job_id)


class HostSpec(CPUOffloadingSpec):
    def get_manager(self) -> HostManager:
        if self._manager is None:
            self._manager = HostManager(num_chunks=self.num_chunks, cache_policy="lru")
        assert isinstance(self._manager, HostManager)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        return HostWorker(kv_caches, self.num_chunks)
