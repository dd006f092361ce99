"""Told what a compressed request holds: vLLM's check at start that the pool is large enough for one."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvreclaim.integrations.vllm import family
from kvreclaim.integrations.vllm.asking import is_asked_for
from kvreclaim.integrations.vllm.wrapping import wrap


def install() -> None:
    """Wrap it, if it is there: the check of signatures refuses otherwise, if we are asked for. Idempotent.

    Raises: UnsupportedVllmError.
    """
    ours = family.module("pool_check")
    module = import_module(ours.MODULE)
    if hasattr(module, ours.NEEDED):
        wrap(module, ours.NEEDED, lambda original: _relaxed(original, module, ours.PER_BLOCK))


def _relaxed(original: Callable[..., Any], module: Any, per_block: str) -> Callable[..., Any]:
    """A compressed request never holds more than its budget, interval and one chunk.

    Both of vLLM's functions end in the same arguments: the configuration and the groups of layers.
    """

    def max_memory_usage_bytes(*args: Any) -> Any:
        needed = original(*args)
        vllm_config, kv_cache_groups = args[-2:]
        if not is_asked_for(vllm_config.additional_config, {}):
            return needed
        capped_bytes = family.module("front").capped_bytes
        return capped_bytes(needed, vllm_config, kv_cache_groups, lambda: getattr(module, per_block)(*args))

    return max_memory_usage_bytes
