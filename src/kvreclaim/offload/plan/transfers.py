"""Transfers between slots of the host and those of a file below it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Generic, TypeVar

from kvreclaim.memory.prefix.index import BlockName

Store = TypeVar("Store")
Load = TypeVar("Load")


class TransferOutcome(Enum):
    """Outcome of a transfer. GONE: the file holds something else there, or damaged bytes."""

    OK = "ok"
    GONE = "gone"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Transfer:
    """A copy between a host slot and a disk slot. Both are referenced until `finish`."""

    job_id: int
    to_disk: bool
    host_slot: int
    disk_slot: int
    name: BlockName


class Transfers(ABC, Generic[Store, Load]):
    """Tracks copies between host and disk. The caller carries out `take_transfers` in order, and calls
    `finish` for each, in any order."""

    def __init__(self) -> None:
        self.num_stored = self.num_loaded = self.num_gone = self.num_failed = 0
        self._ids = count()
        self._out: list[Transfer] = []
        self._stores: dict[int, Store] = {}
        self._loads: dict[int, Load] = {}
        self._is_reset = False

    @property
    def num_loading(self) -> int:
        """Loads under way."""
        return len(self._loads)

    @property
    def num_storing(self) -> int:
        return len(self._stores)

    @abstractmethod
    def recover(self, found: Iterable[tuple[int, BlockName]]) -> int:
        """Enter the file's records; to be called first. Returns: how many can be found."""

    def _begin(self, to_disk: bool, host_slot: int, disk_slot: int, name: BlockName) -> Transfer:
        transfer = Transfer(next(self._ids), to_disk, host_slot, disk_slot, name)
        self._out.append(transfer)
        return transfer

    def take_transfers(self) -> list[Transfer]:
        """Transfers since the last call."""
        out, self._out = self._out, []
        return out

    def finish(self, job_id: int, outcome: TransferOutcome) -> None:
        """A transfer has ended."""
        if job_id in self._stores:
            self._finish_store(self._stores.pop(job_id), outcome)
        else:
            self._finish_load(self._loads.pop(job_id), outcome)

    @abstractmethod
    def _finish_store(self, store: Store, outcome: TransferOutcome) -> None: ...

    @abstractmethod
    def _finish_load(self, load: Load, outcome: TransferOutcome) -> None: ...

    def reset(self) -> None:
        """Forget everything in the file, transfers under way included."""
        for transfer in self.take_transfers():
            self.finish(transfer.job_id, TransferOutcome.FAILED)
        self._is_reset = True

    def take_reset(self) -> bool:
        """Whether to remove the file's records, before any later transfer."""
        is_reset, self._is_reset = self._is_reset, False
        return is_reset
