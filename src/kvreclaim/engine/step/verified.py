"""A request whose full cache says the answer: what it excludes, and what drafts for it."""

from __future__ import annotations

from collections.abc import Mapping

from kvreclaim.checks import require
from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.policy import Signal
from kvreclaim.config import BUDGETS, EngineConfig
from kvreclaim.engine.request.footprints import footprint_of
from kvreclaim.engine.request.request import Verify
from kvreclaim.ops.groups import LayerGroups
from kvreclaim.schedule.budget.check import check_blocks


def divided(compressor: Compressor | None) -> tuple[Compressor | None, Compressor | None]:
    """What drafts, and what the request is compressed by: one of them is None."""
    if compressor is not None and compressor.config.verify:
        return compressor, None
    return None, compressor


def verify_of(
    drafting: Compressor,
    groups: LayerGroups,
    config: EngineConfig,
    prompt: list[int],
    num_tokens: int,
    *,
    others: Mapping[str, bool],
) -> Verify:
    """How this compressor drafts for a request. num_tokens: that it will have at most; others: of what else
    it may ask for and verify does not go with, whether it does. Raises: InvalidArgumentError."""
    _check(drafting, groups, config, others=others)
    footprint = footprint_of(drafting, config, prompt, None, groups)
    check_blocks(footprint, drafting.policy.name)
    return Verify(drafting, footprint, drafting.config.verify_tokens, budgets_of(drafting, num_tokens))


def _check(
    compressor: Compressor,
    groups: LayerGroups,
    config: EngineConfig,
    *,
    others: Mapping[str, bool],
) -> None:
    """Raise InvalidArgumentError where a compressed cache cannot draft for the full one. others: of what else
    the request may ask for and verify does not go with, whether it does."""
    policy, facts, on_host = compressor.policy, groups.facts, config.full_cache_host_size > 0
    problems = {
        f"policy {policy.name} holds on the device as much as the full cache, which full_cache_host_size "
        "moves to the host; name one that gives blocks back": on_host and not policy.eviction_method.reclaims,
        f"policy {policy.name} keeps scores beside the slots of the full cache, which lie in host memory; "
        "use another policy": on_host and Signal.TOKEN_SCORES in policy.needs,
        f"policy {policy.name} evicts nothing, so there is nothing to draft from; name one that does": (
            policy.eviction_method.keeps_all
        ),
        f"policy {policy.name} turns keys to positions relative to the cache, where exact keys do not fit; "
        "keep the original positions": policy.cache_relative,
        f"policy {policy.name} needs the text to come, which nobody knows; use another policy": (
            Signal.FUTURE_QUERIES in compressor.policy.needs
        ),
        f"layers of {facts.name!r} with sliding windows have block tables of their own; start with "
        "disable_hybrid_kv_cache_manager": bool(groups.windows),
        f"all layers of {facts.name!r} have sliding windows, so the full cache holds no more than these; "
        "leave verify out": groups.trailing is not None,
        **{f"{name} is given; leave one of them out": asked for name, asked in others.items()},
    }
    for problem, holds in problems.items():
        require(not holds, f"verify is True, but {problem}.", "verify")


def budgets_of(compressor: Compressor, num_tokens: int) -> tuple[int, ...]:
    """Steps of a budget that chooses itself, up to the first that holds so many tokens; none where it is
    given."""
    config = compressor.config
    if not config.auto_budget:
        return ()
    first = next((i for i, b in enumerate(BUDGETS) if b >= num_tokens), len(BUDGETS))
    return tuple(b for b in BUDGETS[: first + 1] if b >= config.budget)
