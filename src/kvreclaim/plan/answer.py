"""A plan: the answer to a request, in sections."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from kvreclaim.checks import require
from kvreclaim.compatibility import Feature, refuse
from kvreclaim.compression.spec.grammar import Spec, Value, parse_spec
from kvreclaim.compression.spec.traits import footprint, for_prompt, is_share
from kvreclaim.kv_bytes import kv_bytes
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.demand import Cache
from kvreclaim.plan.on_sequences import on_load, on_model, on_request
from kvreclaim.plan.plan_request import PlanRequest
from kvreclaim.plan.sections import PlanReport
from kvreclaim.plan.weights import dtype_of
from kvreclaim.schedule.budget.footprint import Footprint


def plan(model: str | Path, request: PlanRequest) -> PlanReport:
    """Answer a request. Raises: InvalidArgumentError, UnsupportedModelError."""
    shape = load_shape(model)
    promise = request.promise(request.compression, request.kv_cache_dtype, dtype_of(shape))
    if promise is not None:
        found = promise.compression(request.context or request.prefix + request.own, request.block_size)
        request = replace(
            request,
            compression=found,
            kv_cache_dtype=promise.kv_cache_dtype,
            max_loss=None,
            content=None,
            stats=None,
        )
    auto = request.kv_cache_dtype == "auto"
    form = kv_bytes(request.kv_cache_dtype, dtype_of(shape) if auto else "bf16")
    if request.compression is not None and is_share(request.compression):
        density = form.density(kv_bytes("auto", dtype_of(shape)), shape.attention)
        request = replace(request, compression=_in_tokens(request, request.compression, density))
    cache = Cache(shape, form, _footprint(request))
    check_fits(cache, request.compression)
    for name, unset in (("state_checkpoints", None), ("state_drafts", 0)):
        require(
            getattr(request, name) == unset or shape.has_states,
            f"{name} is {getattr(request, name)}, but {shape.name} has no recurrent layers; leave it out.",
            name,
        )
    answer = PlanReport()
    on_model(answer, cache, request)
    if request.context is not None:
        on_request(answer, cache, request, request.context)
    if request.sequences is not None:
        on_load(answer, cache, request, request.sequences)
    if request.gpu is not None or request.memory_bytes is not None:
        from kvreclaim.plan.on_card import on_card

        on_card(answer, cache, request)
    if request.cards is not None:
        from kvreclaim.plan.choose import on_cards

        on_cards(answer, cache, request)
    return answer


def _footprint(request: PlanRequest) -> Footprint:
    size, chunk = request.block_size, request.max_num_batched_tokens
    if request.compression is None:
        return Footprint(block_size=size, max_chunk=chunk)
    return footprint(request.compression, block_size=size, max_chunk=chunk)


def _in_tokens(request: PlanRequest, compression: str, density: Fraction) -> str:
    """The compression with a share of the bytes of the plan's one length as a number of tokens. Raises:
    InvalidArgumentError where it has another number of lengths."""
    require(
        request.trace is None and (request.context is None) != (request.sequences is None),
        f"compression is {compression!r}, its budget is a share of each prompt, and a plan has one budget; "
        "pass --context or --sequences, or a number of tokens, and for a trace use `kvreclaim simulate`.",
        "compression",
    )
    return for_prompt(
        compression, request.context or request.prefix + request.own, request.block_size, density
    )


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
        Feature.RECURRENT: cache.shape.name if cache.shape.has_states else None,
        Feature.QUANTISED: None if cache.form.is_plain else cache.form.name,
    }
    refuse({feature: name for feature, name in found.items() if name is not None})


def _turns_keys(value: Value) -> bool:
    """Whether a streaming_llm with positions=cache stands anywhere in it."""
    if not isinstance(value, Spec):
        return False
    own = value.name == "streaming_llm" and ("positions", "cache") in value.args
    return own or any(_turns_keys(part) for _, part in value.args)
