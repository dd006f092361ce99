"""The option centred_keys, checked in the front end: keys are centred and scaled before vLLM quantises them.

additional_config["centred_keys"]: true, or the path of a file of `kvreclaim calibrate`. A configuration that
was checked has the path of the statistics, or true for the model's weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreclaim.checks import require
from kvreclaim.compression.stats import QueryStats
from kvreclaim.integrations.vllm.refusals import predicates as find
from kvreclaim.integrations.vllm.refusals.row import model_rows, refuse, rows
from kvreclaim.integrations.vllm.refusals.table import UNTESTED
from kvreclaim.integrations.vllm.settings.enabled import CENTRED, KEY
from kvreclaim.integrations.vllm.settings.model_statistics import model_statistics_at_hand
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.settings.speculation import BY_TOKENS

QUANTISED = find.FP8_DTYPES + find.SLOT_DTYPES
"""KV dtypes that centred and scaled keys are for."""
CALIBRATE = f"run `kvreclaim calibrate` and name its file as {CENTRED}"
_DTYPES = f"use one of {', '.join(QUANTISED)}"


def _scales(layer: Any) -> str | None:
    return "scales of keys (k_scale) in the checkpoint" if (layer._k_scale != 1).any() else None


CONFIG = (
    *rows(
        {find.cache_dtype(*find.PLAIN_DTYPES): f"keys that are stored as they are gain nothing; {_DTYPES}"}
    ),
    *model_rows({find.LATENTS: "its cache holds one latent per token instead of keys per head"}),
    *rows(
        {
            find.other_cache_dtype(*QUANTISED): f"{UNTESTED}; {_DTYPES}",
            find.ANY_CONNECTOR: "blocks of other processes may have other centres, and vLLM's hashes do not "
            "tell them apart",
            find.other_drafter(BY_TOKENS): "drafters with layers of their own are not tested; use "
            f"{BY_TOKENS[0]}",
            find.PIPELINE: "the model is run on one token to find its rotation, which needs all layers; use "
            "--tensor-parallel-size",
            find.DECODE_CONTEXT: f"{UNTESTED}; set it to 1",
            find.PREFILL_CONTEXT: f"{UNTESTED}; set it to 1",
            find.ELASTIC: "workers come and go without weights to take centres from",
            find.MONOKERNELS: "they store keys past the attention layers",
        }
    ),
    *model_rows(
        {
            find.ENCODER_DECODER: "cross attention has a cache of another kind",
            find.NO_ATTENTION: "it has no keys",
            find.present("model_config.is_hybrid", "a model with recurrent layers"): UNTESTED,
        }
    ),
)
LAYER = (
    *model_rows(
        {
            find.not_one_of(
                "__class__.__name__", ("Attention",), "layers of the class {}"
            ): "they may store more than the keys that they are given",
            find.ATTENTION_TYPE: UNTESTED,
            find.SHARED_CACHE: UNTESTED,
            find.FUSED_WRITE: "the model stores keys past its attention layers",
        }
    ),
    *rows({_scales: "they were measured on keys that are not centred; use a checkpoint without them"}),
)


def configure_centred_keys(config: Any) -> None:
    """Check a VllmConfig with the option, and choose the source of centres. Idempotent.

    Raises: InvalidArgumentError, UnsupportedModelError, StatsMismatchError.
    """
    given = config.additional_config[CENTRED]
    require(
        given is True or isinstance(given, str),
        f"{CENTRED} in additional_config is {given!r}; it must be true, or the path of a file of `kvreclaim "
        "calibrate`.",
    )
    refuse(CONFIG, config, option=CENTRED)
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
        refuse(LAYER, layer, f" in {name}", CENTRED)


def _statistics(config: Any) -> str | None:
    """The file that compression reads, else one that needs no search."""
    if KEY in config.additional_config and (stats := Options.of_config(config).stats) is not None:
        return stats
    return model_statistics_at_hand(config)


def _has_keys(stats: str) -> bool:
    return QueryStats.load(stats).keys() is not None
