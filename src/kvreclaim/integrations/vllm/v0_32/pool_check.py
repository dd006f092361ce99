"""The start check of the pool in vLLM 0.32: does one request of max_model_len fit?"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from kvreclaim.integrations.vllm.asking import is_asked_for
from kvreclaim.integrations.vllm.hooks import wrap

MODULE = "vllm.v1.core.kv_cache_utils"
NAME = "_max_memory_usage_bytes_from_groups"


def install() -> None:
    """Wrap it, if it is there: the check of signatures refuses otherwise, if we are asked for. Idempotent."""
    module = import_module(MODULE)
    if hasattr(module, NAME):
        wrap(module, NAME, _relaxing)


def _relaxing(original: Callable[..., Any]) -> Callable[..., Any]:
    """A compressed request never holds more than its budget, interval and one chunk."""

    def max_memory_usage_bytes(vllm_config: Any, kv_cache_groups: Any) -> Any:
        needed = original(vllm_config, kv_cache_groups)
        if not is_asked_for(vllm_config.additional_config, {}):
            return needed
        from vllm.v1.core.kv_cache_utils import _pool_bytes_per_block

        from kvreclaim.integrations.vllm.v0_32.front_side import capped_bytes

        return capped_bytes(
            needed, vllm_config, kv_cache_groups, lambda: _pool_bytes_per_block(vllm_config, kv_cache_groups)
        )

    return max_memory_usage_bytes
