"""vLLM's own functions that check at start whether the pool is large enough: others in each family."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from kvreclaim.integrations.vllm.settings import family

CHECK = family.find_family().pool_check
MODULE: Any = import_module(CHECK.module)
NEEDED = CHECK.needed
PER_BLOCK = CHECK.per_block


def needed(config: Any, groups: list[Any]) -> int:
    """Bytes that a request of max_model_len holds at most, as vLLM counts them now."""
    return int(_call(NEEDED, config, groups))


def per_block(config: Any, groups: list[Any]) -> int:
    """Bytes of a block."""
    return int(_call(PER_BLOCK, config, groups))


def _call(name: str, config: Any, groups: list[Any]) -> Any:
    function = getattr(MODULE, name)
    if "builder" not in inspect.signature(function).parameters:
        return function(config, groups)
    from vllm.v1.core.kv_cache_config_builder import get_kv_cache_config_builder

    return function(get_kv_cache_config_builder(config), config, groups)
