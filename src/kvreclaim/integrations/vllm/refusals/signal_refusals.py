"""What does not go with policies that look at what layers are given, checked in the front end."""

from __future__ import annotations

from typing import Any

from kvreclaim.compression.policy import CompressionPolicy, Signal
from kvreclaim.integrations.vllm.refusals.refusals import ConfigRefusal, kv_connector
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.groups import layer_kinds
from kvreclaim.integrations.vllm.settings.layer_needs import WATCHED

OTHER = "take a policy without these, such as surrogate or knorm"
UNTESTED = "it is not tested"
PLAIN = ("auto", "float16", "bfloat16")


def _compiled(config: Any) -> str | None:
    return None if config.model_config.enforce_eager else "torch.compile and CUDA graphs"


def _dtype(config: Any) -> str | None:
    dtype = config.cache_config.cache_dtype
    return None if dtype in PLAIN else f"--kv-cache-dtype {dtype}"


CONFIG: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(
        lambda _: None if family.find_family().signals else "this version of vLLM",
        UNTESTED,
        f"use vLLM 0.32, or {OTHER}",
    ),
    ConfigRefusal(
        lambda config: "the V2 model runner" if config.use_v2_model_runner else None,
        UNTESTED,
        f"set VLLM_USE_V2_MODEL_RUNNER=0, or {OTHER}",
    ),
    ConfigRefusal(_compiled, "hooks on the layers do not run in them", f"add --enforce-eager, or {OTHER}"),
    ConfigRefusal(
        lambda config: "--speculative-config" if config.speculative_config is not None else None,
        "queries of drafts that are not accepted would be kept, too",
        f"remove it, or {OTHER}",
    ),
    ConfigRefusal(
        lambda config: (kinds := layer_kinds(config.model_config)) and kinds.words,
        UNTESTED,
        OTHER,
    ),
    ConfigRefusal(
        kv_connector,
        "tokens that are loaded show no layer anything",
        f"remove it, or {OTHER}",
    ),
    ConfigRefusal(_dtype, UNTESTED, f"use one of {', '.join(PLAIN)}, or {OTHER}"),
)


SNAPSHOTS = ConfigRefusal(
    lambda snapshots: '"snapshots"' if snapshots else None, UNTESTED, f"remove it, or {OTHER}"
)


def refuse_config_with_signals(vllm_config: Any, policy: CompressionPolicy, *, snapshots: bool) -> None:
    """Raises: InvalidArgumentError with the first reason found."""
    needs = policy.needs & WATCHED
    if not needs:
        return
    what = "hidden states" if Signal.TOKEN_SCORES in needs else "recent queries"
    where = f" beside a policy that looks at {what}"
    for row in CONFIG:
        row.check(vllm_config, where)
    SNAPSHOTS.check(snapshots, where)
