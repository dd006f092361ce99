"""Several KV connectors of vLLM in one engine on a CPU, and what they hold: OffloadingConnector as in
host_offload, SimpleCPUOffloadConnector with copies in host memory in place of CUDA's, which end late, too,
and ExampleConnector as it is.

>>> with host_copies():
...     engine = Engine(model, kv_transfer_config=several(folder, *ALL))
>>> stored(engine)["ExampleConnector"]  # {name of a file: keys and values of a layer}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from host_offload import LATE, offloading, worker_of
from safetensors.torch import load_file
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1 import simple_cpu_offload_connector
from vllm.v1.simple_kv_offload import worker as simple_worker

OFFLOADING, SIMPLE, EXAMPLE = "OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleConnector"
ALL = (EXAMPLE, OFFLOADING, SIMPLE)
Stored = dict[str, dict[Any, torch.Tensor]]


def several(folder: Path, *names: str) -> dict[str, Any]:
    """A --kv-transfer-config of these connectors; ExampleConnector's files lie in folder."""
    more = {SIMPLE: {"cpu_bytes_to_use": 1 << 26}, EXAMPLE: {"shared_storage_path": str(folder)}}
    each = [
        offloading(offload_prompt_only=False)
        if name == OFFLOADING
        else {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": more[name]}
        for name in names
    ]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": each},
    }


@contextmanager
def host_copies() -> Iterator[None]:
    """SimpleCPUOffloadConnectors made meanwhile copy in host memory."""
    with pytest.MonkeyPatch.context() as here:
        here.setattr(simple_cpu_offload_connector, "SimpleCPUOffloadWorker", HostSimpleWorker)
        here.setattr(simple_worker, "DmaCopyBackend", LateCopies)
        yield


def stored(engine: Any) -> Stored:
    """Blocks of the engine's connectors, by name of the connector; no transfer is left under way."""
    while engine.scheduler.has_requests():
        engine.step()
    found: Stored = {}
    ours, theirs = engine.scheduler.connector.sub_connectors, get_kv_transfer_group().sub_connectors
    for scheduler, worker in zip(ours, theirs, strict=True):
        name = type(scheduler).__name__
        if name == OFFLOADING:
            found[name] = worker_of(scheduler, worker).stored()
        elif name == SIMPLE:
            host = worker.worker_handler.cpu_kv_caches.values()
            found[name] = {
                block.block_hash: torch.cat([cache[block.block_id] for cache in host])
                for block in scheduler.scheduler_manager.cpu_block_pool.blocks
                if block.block_hash is not None
            }
        else:
            folder = Path(scheduler._storage_path)
            files = folder.rglob("*.safetensors")
            found[name] = {file.relative_to(folder): load_file(file)["kv_cache"] for file in files}
    return found


@contextmanager
def counted_loads(engine: Any) -> Iterator[Counter[str]]:
    """Tokens that requests load meanwhile, by name of the connector."""
    counts: Counter[str] = Counter()
    connectors: Sequence[Any] = engine.scheduler.connector.sub_connectors

    def counting(connector: Any) -> Any:
        inner = connector.update_state_after_alloc

        def update_state_after_alloc(request: Any, blocks: Any, num_tokens: int) -> None:
            counts[type(connector).__name__] += num_tokens
            inner(request, blocks, num_tokens)

        return update_state_after_alloc

    for connector in connectors:
        connector.update_state_after_alloc = counting(connector)
    try:
        yield counts
    finally:
        for connector in connectors:
            del connector.update_state_after_alloc


class NoStream:
    """Stands in for torch.cuda.Stream."""

    def __init__(self, priority: int) -> None: ...

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0


class HostSimpleWorker(simple_worker.SimpleCPUOffloadWorker):
    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        with patch.object(torch.cuda, "Stream", NoStream):
            super().register_kv_caches(kv_caches)

    def wait_for_save(self) -> None:
        metadata = self._connector_metadata
        if metadata is not None and metadata.store_gpu_blocks:
            blocks = metadata.store_gpu_blocks, metadata.store_cpu_blocks
            self._backend.launch_copy(
                *blocks, is_store=True, event_idx=metadata.store_event, events_list=self._store_events
            )


class LateCopies:
    """Stands in for DmaCopyBackend."""

    def init(self, gpu_caches: Any, cpu_caches: Any, *_: Any) -> None:
        self.pairs = [(gpu_caches[name], cpu_caches[name]) for name in gpu_caches]

    def launch_copy(
        self,
        src_blocks: list[int],
        dst_blocks: list[int],
        is_store: bool,
        event_idx: int,
        events_list: list[Any],
    ) -> None:
        pairs = self.pairs if is_store else [(host, gpu) for gpu, host in self.pairs]
        events_list.append((event_idx, LateCopy(pairs, src_blocks, dst_blocks)))


@dataclass(slots=True)
class LateCopy:
    """Stands in for the torch.Event behind a copy."""

    pairs: list[tuple[torch.Tensor, torch.Tensor]]
    sources: list[int]
    targets: list[int]
    left: int = LATE

    def query(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self._run()
        return self.left <= 0

    def synchronize(self) -> None:
        if self.left > 0:
            self.left = 0
            self._run()

    def _run(self) -> None:
        for source, target in self.pairs:
            target[self.targets] = source[self.sources]
