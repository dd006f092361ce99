"""Select the modules for the installed vLLM. An unknown version is refused even if every name fits."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.resources import files
from types import ModuleType

from kvreclaim.errors import UnsupportedVllmError

_V32 = "kvreclaim.integrations.vllm.v0_32"
_ROOM = files("kvreclaim.integrations.vllm")


@dataclass(frozen=True, slots=True)
class PoolCheck:
    """The check of vLLM's start that the pool is large enough for one request.

    needed, per_block: functions of the module; both end in (configuration, groups of layers)
    """

    module: str
    per_block: str
    needed: str = "_max_memory_usage_bytes_from_groups"


@dataclass(frozen=True, slots=True)
class VllmFamily:
    """The modules for one minor version of vLLM. If two versions agree, both name the older one's.

    tables:     the names of this version: a whole table, and one with the changes of each later version
    pool_check: see there
    front:      configuration, metrics, a request's own settings
    scheduler:  the hooks of the schedulers, the block pool and the tables
    worker:     the model runners
    attention:  the KV caches of the layers
    probing:    the model's layers and their rotation
    cells:      attention over cells, for unequal heads
    centring:   layers that store centred and scaled keys
    drafter:    drafters with layers of their own
    snapshots:  compressed prefixes for later requests
    signals:    hooks on the layers
    """

    tables: tuple[str, ...]
    pool_check: PoolCheck
    front: str = f"{_V32}.front_side"
    scheduler: str = f"{_V32}.scheduler_side"
    worker: str = f"{_V32}.worker_side"
    attention: str = f"{_V32}.attention"
    probing: str = f"{_V32}.probing"
    cells: str = f"{_V32}.cells_side"
    centring: str = f"{_V32}.centring_side"
    drafter: str = f"{_V32}.draft_side"
    snapshots: str = f"{_V32}.snapshot_side"
    signals: str = f"{_V32}.signal_side"

    def expected(self) -> tuple[str, ...]:
        """The texts of its tables."""
        return tuple(_ROOM.joinpath(table).read_text(encoding="utf-8") for table in self.tables)


FAMILIES = {
    "0.32": VllmFamily(
        ("v0_32/expected.txt",), PoolCheck("vllm.v1.core.kv_cache_utils", "_pool_bytes_per_block")
    ),
    "0.33": VllmFamily(
        ("v0_32/expected.txt", "v0_33/changes.txt"),
        # The bytes of a block come from its builder, which platforms may replace.
        PoolCheck("vllm.v1.core.kv_cache_planning", "_pool_bytes_per_block_from_builder"),
    ),
}
*_, NEWEST = FAMILIES


def module(side: str) -> ModuleType:
    """The module of a side (front, scheduler, worker, …) for the installed vLLM. Raises:
    UnsupportedVllmError."""
    return import_module(getattr(find_family(), side))


def find_family() -> VllmFamily:
    """The family of the installed vLLM. Raises: UnsupportedVllmError."""
    import vllm

    return family_of(vllm.__version__)


def is_known() -> bool:
    """Return whether the installed vLLM has a family."""
    import vllm

    return minor(vllm.__version__) in FAMILIES


def family_of(vllm_version: str) -> VllmFamily:
    """Raises: UnsupportedVllmError."""
    family = FAMILIES.get(minor(vllm_version))
    if family is None:
        raise UnsupportedVllmError(
            f"kvreclaim {version('kvreclaim')} does not know vLLM {vllm_version}; known: {supported()}. "
            "Install one of these, or leave kv_compression out of --additional-config and KVRECLAIM_VLLM "
            "unset (docs/vllm.md says how to port it)."
        )
    return family


def supported() -> str:
    """Return the known versions for messages: '0.32.*, 0.33.*'."""
    return ", ".join(f"{family}.*" for family in FAMILIES)


def minor(vllm_version: str) -> str:
    """Return the version without its last number, as FAMILIES has it."""
    return ".".join(vllm_version.split(".")[:2])
