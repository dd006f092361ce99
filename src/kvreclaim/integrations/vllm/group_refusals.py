"""What does not go with several cache groups, full attention beside sliding windows: not tested so far."""

from __future__ import annotations

from typing import Any

from kvreclaim.integrations.vllm import family
from kvreclaim.integrations.vllm.groups import layer_kinds
from kvreclaim.integrations.vllm.refusals import OTHER_MODEL, ConfigRefusal, other_model

WHERE = " for a model whose layers are of several kinds (full attention beside sliding windows)"
UNTESTED = "it is not tested"
CONFIG: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        lambda _: None if family.find_family().groups else "this version of vLLM", UNTESTED, "use vLLM 0.32"
    ),
    ConfigRefusal(
        lambda config: "--speculative-config" if config.speculative_config is not None else None, UNTESTED
    ),
    ConfigRefusal(
        lambda config: "--kv-offloading-size" if config.kv_transfer_config is not None else None, UNTESTED
    ),
)
MODEL = other_model(
    lambda config: (
        None if layer_kinds(config.model_config) else "groups that the model's layer_types do not name"
    ),
    "how many blocks a request needs is known from these",
    OTHER_MODEL,
)


def refuse_config_with_groups(vllm_config: Any) -> None:
    """Check a configuration before its options are read, as far as it says that there will be several groups.

    Raises: InvalidArgumentError.
    """
    if layer_kinds(vllm_config.model_config) is not None:
        for row in CONFIG:
            row.check(vllm_config, WHERE)


def refuse_unnamed_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    """Several groups must be those that the front end has checked for. Raises: UnsupportedModelError."""
    if len(kv_cache_config.kv_cache_groups) > 1:
        MODEL.check(vllm_config)
