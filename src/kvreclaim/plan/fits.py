"""Ways of compressing that a model, a format or a block size cannot serve, refused as the engine does."""

from __future__ import annotations

from kvreclaim.compression.spec.grammar import Spec, Value, parse_spec
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.demand import Cache


def check_fits(cache: Cache, compression: str | None) -> None:
    """Raises: InvalidArgumentError."""
    if compression is None:
        return
    policy, _, _ = compression.partition(":")
    method = cache.footprint.eviction_method
    if all(layer.window for layer in cache.shape.layers) and (method.uneven or method.sparse_reads):
        raise InvalidArgumentError(
            f"policy {policy} keeps or reads unequal tokens per head, which is served for layers with full "
            f"attention, and {cache.shape.name} has none; use a policy with equal counts, such as "
            "query_mixture or snapkv.",
            field="compression",
        )
    if not cache.form.is_plain and _turns_keys(parse_spec(policy)):
        raise InvalidArgumentError(
            f"policy {policy} turns keys to new positions at every pass, and in {cache.form.name} each turn "
            "would round them anew; use positions=original, or kv_cache_dtype bf16, fp16 or fp32.",
            field="kv_cache_dtype",
        )


def _turns_keys(value: Value) -> bool:
    """Whether a streaming_llm with positions=cache stands anywhere in it."""
    if not isinstance(value, Spec):
        return False
    own = value.name == "streaming_llm" and ("positions", "cache") in value.args
    return own or any(_turns_keys(part) for _, part in value.args)
