"""A worker's shard of the model: facts of its own heads, and statistics of their queries.

Statistics are of the whole model, and are checked against the whole model before each rank takes its heads:
the same file serves every degree of tensor parallelism.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvreclaim.compression.refusals import check_inputs, required_stats
from kvreclaim.compression.stats import LayerStats, QueryStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError, UnsupportedModelError
from kvreclaim.integrations.vllm.settings import family
from kvreclaim.integrations.vllm.settings.options import Options
from kvreclaim.integrations.vllm.worker.shard import Shard
from kvreclaim.model.probe import fingerprint, quantization_in
from kvreclaim.ops.facts import LayerFacts, ModelFacts
from kvreclaim.ops.rope_probe import find_rope

if TYPE_CHECKING:
    from kvreclaim.integrations.vllm.v0_32 import probing
else:
    probing = family.module("probing")

NOT_PROBED = "it is looked for only where query statistics are given: set stats"


@dataclass(frozen=True, slots=True, eq=False)
class Described:
    """Facts of this rank's heads in the compressed layers, and their statistics on its device, if given.

    facts.fingerprint: of the whole model; "" without statistics, since nothing is verified then
    """

    facts: ModelFacts
    stats: tuple[LayerStats, ...] | None


@dataclass(frozen=True, slots=True, eq=False)
class RotatedFacts:
    """Facts of layers with their rotation.

    own:   of the heads that this rank holds: shard
    whole: of all heads
    """

    own: ModelFacts
    whole: ModelFacts
    shard: Shard
    rank: int


def rotated_facts(runner: Any, layers: Sequence[Any], remedy: str) -> RotatedFacts:
    """Run the loaded model on one token to find its layers' rotation. All ranks have to call it together.

    remedy: end of the error message

    Raises: UnsupportedModelError.
    """
    own = [probing.shape_of(layer) for layer in layers]
    own = _with_rotation(runner, own, probing.record(runner, layers, remedy), remedy)
    heads = probing.total_heads(runner)
    whole = [replace(layer, num_heads=heads[0], num_kv_heads=heads[1]) for layer in own]
    config = runner.model_config
    identity = fingerprint(config.hf_text_config, whole, quantization_in(config.hf_config))
    facts = _model_facts(config, runner.device, own, identity)
    rank, size = probing.tensor_parallel()
    return RotatedFacts(facts, replace(facts, layers=tuple(whole)), Shard.of_rank(rank, size, *heads), rank)


def describe(runner: Any, options: Options) -> Described:
    """Describe the model that the runner has loaded. All ranks have to call it together.

    The model is run, on one token, only where statistics are given: policies without work with any model.

    Raises:
        InvalidArgumentError:  the statistics cannot be read, or lack what the policy needs
        StatsMismatchError:    they are malformed, or of another model
        UnsupportedModelError: the model has layers without paged attention, or cannot be probed
    """
    layers, full = probing.every_layer(runner), probing.attention_layers(runner)
    ids = tuple(n for n, layer in enumerate(layers) if layer in full)
    if options.stats is None:
        return Described(plain_facts(runner.model_config, runner.device, layers).of_layers(ids), None)
    known = rotated_facts(runner, layers, probing.WITHOUT_STATISTICS)
    facts, shard = known.own.of_layers(ids), known.shard
    whole = replace(known.whole.of_layers(ids), hidden_size=probing.hidden_size(runner))
    stats = _load(options, whole, known.rank).shard(shard.heads, shard.kv_heads)
    return Described(facts, tuple(stats.layer(n).to(facts.device) for n in facts.ids))


def plain_facts(config: Any, device: Any, layers: Sequence[Any]) -> ModelFacts:
    """Describe a model by vLLM's configuration of it and its attention layers, without running it."""
    return _model_facts(config, device, [probing.shape_of(layer) for layer in layers], "", NOT_PROBED)


def _with_rotation(
    runner: Any, layers: Sequence[LayerFacts], recorded: Sequence[probing.Recorded], remedy: str
) -> list[LayerFacts]:
    """The layers with the rotation that explains their queries and keys."""
    frequencies = probing.frequencies(runner)
    ropes = [find_rope(call.queries, call.keys, frequencies) for call in recorded]
    if unknown := [n for n, rope in enumerate(ropes) if rope is None]:
        raise UnsupportedModelError(
            f"layer {unknown[0]} of {runner.model_config.model} encodes positions in a way that no known "
            f"rotation explains, so no query statistics fit it; {remedy}."
        )
    return [replace(layer, rope=rope) for layer, rope in zip(layers, ropes, strict=True)]


def _model_facts(
    config: Any, device: Any, layers: Sequence[LayerFacts], identity: str, problem: str | None = None
) -> ModelFacts:
    return ModelFacts(
        name=config.model,
        fingerprint=identity,
        layers=tuple(layers),
        dtype=config.dtype,
        device=device,
        max_position=config.max_model_len,
        rope_problem=problem,
    )


def _load(options: Options, whole: ModelFacts, rank: int) -> QueryStats:
    """The statistics of the whole model, checked against it."""
    with naming_node(rank):
        policy = options.settings.make_policy()
        stats = required_stats(policy, options.stats)
        stats.check_model(whole)
        check_inputs(policy, stats, whole)
    return stats


@contextmanager
def naming_node(rank: int) -> Iterator[None]:
    """Add the node to an error, because every node reads its own copy of a file."""
    try:
        yield
    except (InvalidArgumentError, StatsMismatchError) as error:
        raise type(error)(f"On {platform.node()}, rank {rank}: {error}") from error
