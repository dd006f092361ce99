"""The option centred_keys, checked in the front end: keys are centred and scaled before vLLM quantises them.

additional_config["centred_keys"]: true, or the path of a file of `kvreclaim calibrate`. A configuration that
was checked has the path of the statistics, or true for the model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreclaim.checks import require
from kvreclaim.compression.stats import QueryStats
from kvreclaim.integrations.vllm.refusals.config_refusals import (
    UNTESTED,
    cache_dtype,
    greater,
    newer,
    present,
)
from kvreclaim.integrations.vllm.refusals.refusals import (
    SLOT_DTYPES,
    ConfigRefusal,
    kv_connector,
    other_model,
)
from kvreclaim.integrations.vllm.settings.enabled import CENTRED, KEY
from kvreclaim.integrations.vllm.settings.model_statistics import model_statistics_at_hand
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.settings.speculation import BY_TOKENS

QUANTISED = ("fp8", "fp8_e4m3", "fp8_e5m2", *SLOT_DTYPES)
"""KV dtypes that centred and scaled keys are for."""
PLAIN = ("auto", "float16", "bfloat16")
DTYPES = f"use one of {', '.join(QUANTISED)}"
CALIBRATE = f"run `kvreclaim calibrate` and name its file as {CENTRED}"


def _unknown_dtype(config: Any) -> str | None:
    dtype = config.cache_config.cache_dtype
    return None if dtype in QUANTISED else f"--kv-cache-dtype {dtype}"


def _drafter(config: Any) -> str | None:
    speculative = config.speculative_config
    if speculative is None or speculative.method in BY_TOKENS:
        return None
    return f"method {speculative.method!r} of --speculative-config"


CONFIG: tuple[ConfigRefusal, ...] = (
    ConfigRefusal(cache_dtype(*PLAIN), "keys that are stored as they are gain nothing", DTYPES),
    other_model(
        present("model_config.use_mla", "multi-head latent attention (MLA)"),
        "its cache holds one latent per token instead of keys per head",
    ),
    ConfigRefusal(_unknown_dtype, UNTESTED, DTYPES),
    ConfigRefusal(
        kv_connector,
        "blocks of other processes may have other centres, and vLLM's hashes do not tell them apart",
    ),
    ConfigRefusal(_drafter, "drafters with layers of their own are not tested", f"use {BY_TOKENS[0]}"),
    ConfigRefusal(
        greater("parallel_config.pipeline_parallel_size", "--pipeline-parallel-size"),
        "the model is run on one token to find its rotation, which needs all layers",
        "use --tensor-parallel-size",
    ),
    ConfigRefusal(
        greater("parallel_config.decode_context_parallel_size", "--decode-context-parallel-size"),
        UNTESTED,
        "set it to 1",
    ),
    ConfigRefusal(
        greater("parallel_config.prefill_context_parallel_size", "--prefill-context-parallel-size"),
        UNTESTED,
        "set it to 1",
    ),
    ConfigRefusal(
        present("parallel_config.enable_elastic_ep", "elastic expert parallelism (--enable-elastic-ep)"),
        "workers come and go without weights to take centres from",
    ),
    ConfigRefusal(
        newer("kernel_config", "monokernel", "MonoKernels (--monokernel)"),
        "they store keys past the attention layers",
    ),
    other_model(
        present("model_config.is_encoder_decoder", "an encoder-decoder model"),
        "cross attention has a cache of another kind",
    ),
    other_model(
        present("model_config.is_attention_free", "a model without attention (Mamba)"), "it has no keys"
    ),
    other_model(present("model_config.is_hybrid", "a model with recurrent layers"), UNTESTED),
)

LAYER: tuple[ConfigRefusal, ...] = (
    other_model(
        lambda layer: (
            f"layers of the class {type(layer).__name__}" if type(layer).__name__ != "Attention" else None
        ),
        "they may store more than the keys that they are given",
    ),
    other_model(
        lambda layer: f"attention of type {str(layer.attn_type)!r}" if layer.attn_type != "decoder" else None,
        UNTESTED,
    ),
    other_model(
        lambda layer: "a cache shared with another layer" if layer.kv_sharing_target_layer_name else None,
        UNTESTED,
    ),
    other_model(
        lambda layer: (
            "a fused write to the cache" if getattr(layer, "kv_cache_update_bypass", False) else None
        ),
        "the model stores keys past its attention layers",
    ),
    ConfigRefusal(
        lambda layer: "scales of keys (k_scale) in the checkpoint" if (layer._k_scale != 1).any() else None,
        "they were measured on keys that are not centred",
        "use a checkpoint without them",
    ),
)


def configure_centred_keys(config: Any) -> None:
    """Check a VllmConfig with the option, and settle where centres come from. Idempotent.

    Raises: InvalidArgumentError, UnsupportedModelError, StatsMismatchError.
    """
    given = config.additional_config[CENTRED]
    require(
        given is True or isinstance(given, str),
        f"{CENTRED} in additional_config is {given!r}; it must be true, or the path of a file of `kvreclaim "
        "calibrate`.",
    )
    for row in CONFIG:
        row.check(config, option=CENTRED)
    source: object = given
    if isinstance(given, str):
        require(
            _has_keys(given),
            f"the statistics {given!r} in {CENTRED} hold no means of keys; {CALIBRATE}, or set it to true.",
        )
    else:
        found = _statistics(config)
        source = found if found is not None and _has_keys(found) else True
    config.additional_config = {**config.additional_config, CENTRED: source}


def refuse_layers_of_centred_keys(layers: Mapping[str, Any]) -> None:
    """Check the attention layers with a quantised cache by name. Raises: InvalidArgumentError,
    UnsupportedModelError."""
    for name, layer in layers.items():
        for row in LAYER:
            row.check(layer, f" in {name}", CENTRED)


def _statistics(config: Any) -> str | None:
    """The file that compression reads, else one that needs no search."""
    if KEY in config.additional_config and (stats := Options.of_config(config).stats) is not None:
        return stats
    return model_statistics_at_hand(config)


def _has_keys(stats: str) -> bool:
    return QueryStats.load(stats).keys() is not None
