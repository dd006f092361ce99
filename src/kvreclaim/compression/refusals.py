"""Policies that a model or its statistics cannot serve, each refused with its reason and what to do."""

from __future__ import annotations

from kvreclaim.compression.config import StatsSource
from kvreclaim.compression.policy import CompressionPolicy, Signal
from kvreclaim.compression.stats import RECALIBRATE, LayerStats, QueryStats
from kvreclaim.errors import InvalidArgumentError, StatsMismatchError
from kvreclaim.ops.facts import ModelFacts
from kvreclaim.ops.formats import KVFormat
from kvreclaim.schedule.budget.recall import Recall

_PARTS = {
    Signal.QUERY_CENTERS: ("centers", "centres", "with centres"),
    Signal.QUERY_COVARIANCE: ("q_cov", "the covariance of the queries", "with --covariance"),
    Signal.SURROGATE: ("surrogate", "a surrogate", "without --no-surrogate"),
    Signal.TOKEN_SCORES: ("kvzap_out", "weights of hidden states", "with --kvzap linear"),
    Signal.HEAD_SHARES: ("head_shares", "shares of heads", "without --no-surrogate"),
}
"""Parts of statistics that may be absent: the tensor, what it is, how it is calibrated."""
STATISTICS = frozenset({Signal.QUERY_STATS, *_PARTS})


def check_policy(policy: CompressionPolicy, facts: ModelFacts) -> None:
    """Raise InvalidArgumentError if the policy's way of compressing does not go with the model, or with
    itself."""
    if policy.eviction_method.uneven or policy.eviction_method.sparse_reads:
        _refuse_layers(policy, facts)
    if policy.eviction_method.uneven:
        _check_uneven(policy)
    if policy.cache_relative and not policy.eviction_method.equal_heads:
        raise InvalidArgumentError(
            f"policy {policy.name} takes a token's slot for its position, which goes with equal counts that "
            "slide together alone; let its eviction_method be COMPACT."
        )
    if policy.cache_relative or policy.needs & STATISTICS:
        _check_rotation(policy, facts)
    if Signal.OUTPUT_PROJECTION in policy.needs and any(layer.latent for layer in facts.layers):
        raise InvalidArgumentError(
            f"policy {policy.name} needs the output projection of each query head, as critical does to weigh "
            f"values, and {facts.name!r} keeps one latent for all heads; use a policy without critical."
        )


def check_recall(policy: CompressionPolicy, recall: Recall, facts: ModelFacts) -> None:
    """Raise InvalidArgumentError where evicted tokens of this policy or model cannot come back."""
    name, problem = policy.name, None
    if not policy.eviction_method.equal_heads:
        problem = f"policy {name} does not slide equal numbers of tokens together; use one that does"
    elif policy.cache_relative:
        problem = f"policy {name} turns keys to their slots, which a page has not; use positions=original"
    elif policy.prompt_only:
        problem = f"policy {name} compresses the prompt alone, and no later pass weighs what came back; use "
        problem += "when=always, or another policy"
    elif Signal.TOKEN_SCORES in policy.needs:
        problem = f"policy {name} keeps scores by slot, which do not follow tokens to the host; use surrogate"
    elif any(layer.softmax.window is not None or layer.softmax.chunk is not None for layer in facts.layers):
        problem = (
            f"{facts.name!r} has layers with sliding windows, whose tokens never come back; leave it out"
        )
    elif any(layer.latent for layer in facts.layers):
        problem = f"{facts.name!r} caches latents, of which there are no digests; leave it out"
    elif len({(layer.num_kv_heads, layer.head_dim, layer.v_head_dim) for layer in facts.layers}) > 1:
        problem = f"{facts.name!r} has layers of unequal heads; leave it out"
    if problem is not None:
        raise InvalidArgumentError(f"recall {recall.mode!r} is refused: {problem}.", field="compression")
    if recall.needs_mixture:
        _check_rotation(policy, facts)


def refuse_format(policy: CompressionPolicy, kv_format: KVFormat, *, recalls: bool = False) -> None:
    """Raise InvalidArgumentError if the policy, or recall, does not go with this format of the KV cache."""
    if recalls and kv_format.has_open_blocks:
        raise InvalidArgumentError(
            f"recall is refused in {kv_format.name}, whose scales are of a block, not of its tokens; use "
            "kv_cache_dtype turboquant4, int4, int8, fp8 or a plain format.",
            field="compression",
        )
    if policy.cache_relative and not kv_format.is_plain:
        raise InvalidArgumentError(
            f"policy {policy.name} turns keys to new positions at every pass, and in {kv_format.name} each "
            "turn would round them anew; use positions=original, or kv_cache_dtype bf16, fp16 or fp32."
        )


def _refuse_layers(policy: CompressionPolicy, facts: ModelFacts) -> None:
    odd = [n for n, layer in enumerate(facts.layers) if layer.softmax.window is not None]
    if not odd:
        return
    what = (
        "keeps unequal numbers of tokens per head"
        if policy.eviction_method.uneven
        else "reads some blocks per head"
    )
    raise InvalidArgumentError(
        f"policy {policy.name} {what}, which is not served for layers with a sliding window that share the "
        f"others' block table, and layer {odd[0]} of {facts.name!r} is one; use a policy with equal counts, "
        "such as query_mixture or snapkv, or, if other layers have full attention, start without "
        "disable_hybrid_kv_cache_manager and kv_offloading_size."
    )


def _check_uneven(policy: CompressionPolicy) -> None:
    if Signal.ATTENTION_MASS in policy.needs:
        raise InvalidArgumentError(
            f"policy {policy.name} keeps unequal numbers of tokens per head, for which no attention mass is "
            "kept; rank tokens by recent queries, statistics or keys instead."
        )


def _check_rotation(policy: CompressionPolicy, facts: ModelFacts) -> None:
    unknown = [n for n, layer in enumerate(facts.layers) if layer.rope is None]
    if facts.rope_problem is None and not unknown:
        return
    reason = facts.rope_problem or f"no rotation is known for layer {unknown[0]}"
    raise InvalidArgumentError(
        f"policy {policy.name} needs the rotation of {facts.name!r}, which is not known ({reason}); "
        "use a policy that needs none, such as knorm or streaming_llm."
    )


def layer_stats(
    policy: CompressionPolicy, given: StatsSource | tuple[LayerStats, ...] | None, facts: ModelFacts
) -> tuple[LayerStats, ...]:
    """The statistics of every layer, on the model's device; a tuple is that already.

    Raises: InvalidArgumentError if there are none or they lack what the policy needs; StatsMismatchError if
        they are malformed or of another model.
    """
    if isinstance(given, tuple):
        assert len(given) == facts.num_layers, f"{len(given)} statistics for {facts.num_layers} layers"
        _check_contents(policy, given[0], f"of {facts.name!r}")
        return given
    stats = required_stats(policy, given)
    stats.check_model(facts)
    if Signal.TOKEN_SCORES in policy.needs and stats.metadata.kvzap_inputs != facts.hidden_size:
        raise StatsMismatchError(
            f"policy {policy.name} weighs hidden states of {stats.metadata.kvzap_inputs} numbers, and the "
            f"attention layers of {facts.name!r} are given {facts.hidden_size or 'none that could be seen'}; "
            f"{RECALIBRATE}, or use surrogate."
        )
    return tuple(stats.layer(n).to(facts.device) for n in facts.ids)


def require_centers(policy: CompressionPolicy, stats: tuple[LayerStats, ...]) -> None:
    """Raise InvalidArgumentError where recall is to go by a mixture of queries that is not known."""
    if any(layer.centers is None for layer in stats):
        raise InvalidArgumentError(
            f"recall beside policy {policy.name} goes by centres of queries, and the statistics hold none; "
            f"{RECALIBRATE} with centres, or use source=recent.",
            field="compression",
        )


def required_stats(policy: CompressionPolicy, given: StatsSource | None) -> QueryStats:
    """The statistics, loaded. Raises InvalidArgumentError if they lack what the policy needs."""
    if given is None:
        raise InvalidArgumentError(
            f"policy {policy.name} needs query statistics and none were given; {RECALIBRATE} "
            "and pass the file as stats."
        )
    stats = given if isinstance(given, QueryStats) else QueryStats.load(given)
    _check_contents(policy, stats, f"of {stats.metadata.model_name!r} ({stats.metadata.source})")
    return stats


def _check_contents(policy: CompressionPolicy, stats: QueryStats | LayerStats, whose: str) -> None:
    for signal, (name, what, how) in _PARTS.items():
        if signal in policy.needs and getattr(stats, name) is None:
            raise InvalidArgumentError(
                f"policy {policy.name} needs statistics with {what}, and those {whose} hold none; "
                f"{RECALIBRATE} {how}."
            )
