"""What does not go with several cache groups, full attention beside sliding windows or recurrent layers: not
tested so far, or impossible."""

from __future__ import annotations

from typing import Any

from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.refusals.refusals import (
    OTHER_MODEL,
    ConfigRefusal,
    kv_connector,
    other_model,
)
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.groups import layer_kinds

UNTESTED = "it is not tested"
CONFIG: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        lambda _: None if family.find_family().groups else "this version of vLLM", UNTESTED, "use vLLM 0.32"
    ),
    ConfigRefusal(
        lambda config: "--speculative-config" if config.speculative_config is not None else None, UNTESTED
    ),
    ConfigRefusal(kv_connector, UNTESTED),
)
RECURRENT: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        lambda config: "the V2 model runner" if config.use_v2_model_runner else None,
        UNTESTED,
        "set VLLM_USE_V2_MODEL_RUNNER=0",
    ),
)
STATISTICS = ConfigRefusal(
    lambda config: "query statistics" if _is_recurrent(config) else None,
    "statistics of hybrid models are not tested in the plugin",
    "leave out stats and name a policy without them, such as shares(keydiff), lagkv or streaming_llm",
    UnsupportedModelError,
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
    kinds = layer_kinds(vllm_config.model_config)
    if kinds is not None:
        for row in (*CONFIG, *(RECURRENT if kinds.window is None else ())):
            row.check(
                vllm_config,
                f" for a model whose layers are of several kinds (full attention beside {kinds.words})",
            )


def refuse_statistics(vllm_config: Any) -> None:
    """Check a model for which the policy, or the operator, wants query statistics. Raises:
    UnsupportedModelError."""
    STATISTICS.check(vllm_config, " of a model with recurrent layers")


def _is_recurrent(config: Any) -> bool:
    kinds = layer_kinds(config.model_config)
    return kinds is not None and kinds.window is None


def refuse_unnamed_groups(vllm_config: Any, kv_cache_config: Any) -> None:
    """Several groups must be those that the front end has checked for. Raises: UnsupportedModelError."""
    if len(kv_cache_config.kv_cache_groups) > 1:
        MODEL.check(vllm_config)
