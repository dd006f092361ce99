"""Ways of compressing that a model, a format or a block size cannot serve, refused as the engine does."""

from __future__ import annotations

from kvreclaim.compatibility import Feature, refuse
from kvreclaim.compression.spec.grammar import Spec, Value, parse_spec
from kvreclaim.plan.demand import Cache


def check_fits(cache: Cache, compression: str | None) -> None:
    """Raises: InvalidArgumentError."""
    if compression is None:
        return
    policy, _, _ = compression.partition(":")
    method, name = cache.footprint.eviction_method, cache.shape.name
    found = {
        Feature.UNEQUAL_HEADS: policy if method.uneven else None,
        Feature.READS_SPARSELY: policy if method.sparse_reads else None,
        Feature.SHARED_WINDOWS: (
            f"every layer of {name}" if all(layer.window for layer in cache.shape.layers) else None
        ),
        Feature.CACHE_POSITIONS: policy if _turns_keys(parse_spec(policy)) else None,
        Feature.QUANTISED: None if cache.form.is_plain else cache.form.name,
    }
    refuse({feature: said for feature, said in found.items() if said is not None})


def _turns_keys(value: Value) -> bool:
    """Whether a streaming_llm with positions=cache stands anywhere in it."""
    if not isinstance(value, Spec):
        return False
    own = value.name == "streaming_llm" and ("positions", "cache") in value.args
    return own or any(_turns_keys(part) for _, part in value.args)
