"""Features of policies, KV formats and models for the table of refusals, and checks of statistics."""

from __future__ import annotations

from kvreclaim.compression.config import StatsSource
from kvreclaim.compression.policy import CompressionPolicy, Signal
from kvreclaim.compression.stats import LayerStats, QueryStats
from kvreclaim.compression.stats_metadata import RECALIBRATE
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import KVFormat
from kvreclaim.refusals import Feature, refuse

_PARTS = {
    Signal.QUERY_CENTERS: ("centers", "centres", "with centres"),
    Signal.QUERY_COVARIANCE: ("q_cov", "the covariance of the queries", "with --covariance"),
    Signal.SURROGATE: ("surrogate", "a surrogate", "without --no-surrogate"),
    Signal.TOKEN_SCORES: ("kvzap_out", "weights of hidden states", "with --kvzap linear"),
    Signal.HEAD_SHARES: ("head_shares", "shares of heads", "without --no-surrogate"),
}
"""Parts of statistics that may be absent: the tensor, what it is, how it is calibrated."""
STATISTICS = frozenset({Signal.QUERY_STATS, *_PARTS})


_SIGNALS = {
    Signal.TOKEN_SCORES: Feature.TOKEN_SCORES,
    Signal.ATTENTION_MASS: Feature.ATTENTION_MASS,
    Signal.RECENT_QUERIES: Feature.RECENT_QUERIES,
    Signal.FUTURE_QUERIES: Feature.FUTURE_QUERIES,
    Signal.READ_AGAIN: Feature.READS_AGAIN,
    Signal.OUTPUT_PROJECTION: Feature.OUTPUT_PROJECTION,
}


def policy_features(policy: CompressionPolicy) -> dict[Feature, object]:
    """Return features of a policy for the table of refusals."""
    method = policy.eviction_method
    has = {
        Feature.KEEPS_ALL: method.keeps_all,
        Feature.KEEPS_BLOCKS: not method.evicts,
        Feature.READS_SPARSELY: method.sparse_reads,
        Feature.WHOLE_BLOCKS: method.whole_blocks,
        Feature.UNEQUAL_HEADS: method.uneven,
        Feature.NOT_COMPACTED: not method.equal_heads,
        Feature.CACHE_POSITIONS: policy.cache_relative,
        Feature.PROMPT_ONLY: policy.prompt_only,
        Feature.EVERY_PASS: not policy.prompt_only,
        **{feature: signal in policy.needs for signal, feature in _SIGNALS.items()},
    }
    return {feature: policy.name for feature, holds in has.items() if holds}


def format_features(kv_format: KVFormat) -> dict[Feature, object]:
    """Return features of a KV format for the table of refusals; None: off."""
    return {
        Feature.QUANTISED: None if kv_format.is_plain else kv_format.name,
        Feature.ROTATED: kv_format.name if kv_format.is_rotated else None,
    }


def model_features(facts: ModelFacts) -> dict[Feature, object]:
    """Return features of layers that share one block table; None and False: off."""
    layers, name = facts.layers, repr(facts.name)
    windowed = [n for n, layer in zip(facts.ids, layers, strict=True) if layer.softmax.window is not None]
    has_chunks = any(layer.softmax.chunk for layer in layers)
    problem = _rotation_problem(facts)
    return {
        Feature.SHARED_WINDOWS: f"layer {windowed[0]} of {name}" if windowed else None,
        Feature.WINDOWS: name if windowed or has_chunks else None,
        Feature.LATENT: name if any(layer.latent for layer in layers) else None,
        Feature.UNKNOWN_ROTATION: None if problem is None else f"{name} ({problem})",
    }


def check_policy(policy: CompressionPolicy, facts: ModelFacts) -> None:
    """Raise InvalidArgumentError if the policy contradicts itself or the model."""
    rotates = policy.cache_relative or policy.needs & STATISTICS
    beside = {Feature.NEEDS_ROTATION: policy.name if rotates else None}
    refuse(policy_features(policy) | model_features(facts) | beside)


def _rotation_problem(facts: ModelFacts) -> str | None:
    """Return why the rotation of keys is unknown; None: it is known."""
    unknown = [n for n, layer in zip(facts.ids, facts.layers, strict=True) if layer.rope is None]
    if facts.rope_problem is None and not unknown:
        return None
    return facts.rope_problem or f"no rotation is known for layer {unknown[0]}"


def layer_stats(
    policy: CompressionPolicy, given: StatsSource | tuple[LayerStats, ...] | None, facts: ModelFacts
) -> tuple[LayerStats, ...]:
    """Return the statistics of every layer, on the model's device; a tuple is that already.

    Raises: InvalidArgumentError if there are none or they lack what the policy needs; StatsMismatchError if
        they are malformed or of another model.
    """
    if isinstance(given, tuple):
        assert len(given) == facts.num_layers, f"{len(given)} statistics for {facts.num_layers} layers"
        _check_contents(policy, given[0], f"of {facts.name!r}")
        return given
    stats = required_stats(policy, given)
    stats.check_model(facts)
    check_inputs(policy, stats, facts)
    return tuple(stats.layer(n).to(facts.device) for n in facts.ids)


def check_inputs(policy: CompressionPolicy, stats: QueryStats, facts: ModelFacts) -> None:
    """Raise StatsMismatchError if the policy needs weights of hidden states, and they are of another size."""
    if Signal.TOKEN_SCORES in policy.needs and stats.metadata.kvzap_inputs != facts.hidden_size:
        raise StatsMismatchError(
            f"policy {policy.name} weighs hidden states of {stats.metadata.kvzap_inputs} numbers, and the "
            f"attention layers of {facts.name!r} are given {facts.hidden_size or 'none that could be seen'}; "
            f"{RECALIBRATE}, or use surrogate."
        )


def required_stats(policy: CompressionPolicy, given: StatsSource | None) -> QueryStats:
    """Return the statistics, loaded. Raises InvalidArgumentError if they lack what the policy needs."""
    if given is None:
        raise InvalidArgumentError(
            f"policy {policy.name} needs query statistics and none were given; {RECALIBRATE} "
            "and pass the file as stats."
        )
    stats = given if isinstance(given, QueryStats) else QueryStats.load(given)
    _check_contents(policy, stats, f"of {stats.metadata.model_name!r} ({stats.metadata.source})")
    return stats


def _check_contents(policy: CompressionPolicy, stats: QueryStats | LayerStats, owner: str) -> None:
    for signal, (name, what, how) in _PARTS.items():
        if signal in policy.needs and getattr(stats, name) is None:
            raise InvalidArgumentError(
                f"policy {policy.name} needs statistics with {what}, and those {owner} hold none; "
                f"{RECALIBRATE} {how}."
            )
