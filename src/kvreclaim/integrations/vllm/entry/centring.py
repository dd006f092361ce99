"""Centred and scaled keys in a worker: found once the model is loaded, before anything is compiled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvreclaim.compression.stats import QueryStats
from kvreclaim.errors import UnsupportedModelError
from kvreclaim.integrations.vllm.entry.facts import RotatedFacts, naming_node, rotated_facts
from kvreclaim.integrations.vllm.refusals import signatures
from kvreclaim.integrations.vllm.refusals.centred_keys import (
    CALIBRATE,
    QUANTISED,
    refuse_layers_of_centred_keys,
)
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.enabled import CENTRED, has_centred_keys
from kvreclaim.model.key_transforms import transforms_digest, transforms_from, weight_stats
from kvreclaim.ops.key_transform import KeyStats, KeyTransform

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.v0_32 import centring_side, probing
else:
    centring_side, probing = map(family.module, ("centring", "probing"))

logger = logging.getLogger("vllm.kvreclaim")
REMEDY = f"leave {CENTRED} out"


class CentringHooks:
    """Mixin of a vLLM worker. Each hook calls vLLM's own method first."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Raises: UnsupportedVllmError, UnsupportedModelError, InvalidArgumentError, StatsMismatchError."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        worker: Any = self
        config = worker.vllm_config.additional_config
        if has_centred_keys(config):
            centre_keys(worker.model_runner, config[CENTRED])


def centre_keys(runner: Any, source: bool | str) -> None:
    """Centre and scale the keys of all layers with a quantised cache. All ranks have to call it together.

    source: the file of the statistics; True: the model's weights

    Raises: UnsupportedVllmError, UnsupportedModelError, InvalidArgumentError, StatsMismatchError.
    """
    signatures.check_centring()
    layers = probing.decoder_layers(runner)
    coded = [layer.kv_cache_dtype in QUANTISED for layer in layers]
    refuse_layers_of_centred_keys(
        {layer.layer_name: layer for layer, is_coded in zip(layers, coded, strict=True) if is_coded}
    )
    facts = rotated_facts(runner, layers, REMEDY)
    made = transforms_from(facts.own, _stats(runner, layers, facts, source))
    if made is None:
        raise UnsupportedModelError(_nothing(runner.model_config.model, source))
    used: list[KeyTransform] = []
    for layer, transform, is_coded in zip(layers, made, coded, strict=True):
        if is_coded:
            centring_side.centre_layer(layer, transform, runner.model_config.dtype)
            used.append(transform)
    logger.info(
        "kvreclaim: %d of %d layers store centred and scaled keys (digest %s of this rank)",
        len(used),
        len(layers),
        transforms_digest(used),
    )


def _stats(
    runner: Any, layers: Sequence[Any], facts: RotatedFacts, source: bool | str
) -> Sequence[KeyStats] | None:
    if not isinstance(source, str):
        weights = centring_side.weights_of(runner.get_model(), layers, facts.own.layers)
        return weight_stats(weights, facts.own)
    with naming_node(facts.rank):
        stats = QueryStats.load(source)
        stats.check_model(facts.whole)
    return stats.shard(facts.shard.heads, facts.shard.kv_heads).keys()


def _nothing(model: str, source: bool | str) -> str:
    if isinstance(source, str):
        return f"{CENTRED}: the statistics {source!r} give no key of {model} a centre or a scale; {REMEDY}."
    return (
        f"{CENTRED}: neither biases nor norms of queries and keys were found in every attention layer of "
        f"{model}, and there are no statistics; {CALIBRATE}, or {REMEDY}."
    )
