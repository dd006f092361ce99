"""Which files of ours fit the installed vLLM. An unknown version is refused even where every name fits."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from kvreclaim.errors import UnsupportedVllmError

FAMILIES = {"0.32": "kvreclaim.integrations.vllm.v0_32.front_side"}


def find_family() -> ModuleType:
    """The front-end module of the installed vLLM's family. Raises: UnsupportedVllmError."""
    import vllm

    return import_module(module_of(vllm.__version__))


def module_of(vllm_version: str) -> str:
    """Raises: UnsupportedVllmError."""
    family = ".".join(vllm_version.split(".")[:2])
    if family not in FAMILIES:
        raise UnsupportedVllmError(
            f"kvreclaim {version('kvreclaim')} does not know vLLM {vllm_version}; known: {supported()}. "
            "Install one of these, or leave kv_compression out of --additional-config and KVRECLAIM_VLLM "
            "unset (docs/vllm.md says how to port it)."
        )
    return FAMILIES[family]


def supported() -> str:
    """For messages: '0.32.*'."""
    return ", ".join(f"{family}.*" for family in FAMILIES)
