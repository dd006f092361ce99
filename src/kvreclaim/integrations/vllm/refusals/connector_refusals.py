"""KV connectors beside compression: those that come to hold exact blocks only, and why others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvreclaim.integrations.vllm.refusals.refusals import ConfigRefusal

CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector", "ExampleConnector")
"""KV connectors that go with compression, alone and within a MultiConnector."""
REMEDY = f"use {', '.join(CONNECTORS)} or a MultiConnector of these, with vLLM 0.32"


def _named(transfer: Mapping[str, Any] | None) -> Iterator[tuple[str, str | None]]:
    """Name and module of each connector that the fields of a KVTransferConfig ask for."""
    if transfer is None:
        return
    name, place = transfer["kv_connector"], transfer.get("kv_connector_module_path")
    if name != "MultiConnector" or place:
        yield name, place
        return
    for each in transfer["kv_connector_extra_config"].get("connectors", ()):
        yield from _named(each)


def _connectors(config: Any) -> list[tuple[str, str | None]]:
    transfer = config.kv_transfer_config
    return list(_named(None if transfer is None else vars(transfer)))


def _one_of(*names: str) -> Callable[[Any], str | None]:
    def find(config: Any) -> str | None:
        found = [name for name, place in _connectors(config) if name in names and not place]
        return f"the KV connector {found[0]}" if found else None

    return find


def _other(config: Any) -> str | None:
    import vllm

    for name, place in _connectors(config):
        if place or name not in CONNECTORS or not vllm.__version__.startswith("0.32."):
            return f"the KV connector {name} of {place or f'vLLM {vllm.__version__}'}"
    return None


def _same_files(config: Any) -> str | None:
    found, size = _one_of("ExampleConnector")(config), config.parallel_config.tensor_parallel_size
    return f"{found} and --tensor-parallel-size {size}" if found and size > 1 else None


ROWS: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        _one_of(
            *("NixlConnector", "NixlPullConnector", "NixlPushConnector", "MooncakeConnector"),
            "MoRIIOConnector",
        ),
        "it hands over whole prompts once they are computed, and a pass may have taken tokens from them",
        REMEDY,
    ),
    ConfigRefusal(
        _one_of("LMCacheConnectorV1"),
        "it takes hits whole and resumes requests with a hit only, and it is not tested",
        REMEDY,
    ),
    ConfigRefusal(_other, "it is not tested", REMEDY),
    ConfigRefusal(_same_files, "all ranks write the same files", "remove one of them"),
)
