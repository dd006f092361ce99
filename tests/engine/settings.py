"""Compression settings that make many passes over short sequences, and what holds afterwards."""

from __future__ import annotations

from kvreclaim import CompressionConfig
from kvreclaim.compression.policy import CompressionPolicy, Signal
from kvreclaim.compression.registry import make_policy, policy_names
from kvreclaim.schedule.budget.eviction_method import EvictionMethod

UPFRONT = {Signal.RECENT_QUERIES, Signal.ATTENTION_MASS, Signal.TOKEN_SCORES}
"""Known only of tokens that were computed with them."""


def _serves(policy: CompressionPolicy) -> bool:
    """Equal counts, token by token, of a text that is not known beforehand, again and again; test_uneven,
    test_whole_blocks, test_policies_end_to_end and test_prompt_only have the others."""
    fixed = (
        policy.eviction_method in (EvictionMethod.CELLS, EvictionMethod.BLOCKS)
        or Signal.FUTURE_QUERIES in policy.needs
    )
    return policy.eviction_method.evicts and not fixed and not policy.prompt_only


EVICTING = tuple(name for name in policy_names() if _serves(make_policy(name)))
MOVING = tuple(
    name
    for name in EVICTING
    if make_policy(name).eviction_method in (EvictionMethod.COMPACT, EvictionMethod.CELLS)
)


def takes_every_hit(policy: str) -> bool:
    """Whether a prefix hit costs the policy nothing that it would have seen."""
    return not make_policy(policy).needs & UPFRONT


def small(policy: str = "query_mixture", **fields) -> CompressionConfig:
    """A budget that makes many passes over short sequences."""
    return CompressionConfig(policy, **{"budget": 24, "interval": 8, "sinks": 2, "recent": 8, **fields})


def assert_idle(llm) -> None:
    """Nothing runs or waits, and every block is free or cached."""
    llm.engine.memory.check()
    stats = llm.engine.memory.stats()
    assert stats.in_use == 0
    assert stats.free + stats.cached == stats.num_blocks
    assert not llm.engine.has_unfinished
    assert not llm.engine.scheduler.waiting
    assert not llm.engine.scheduler.running


def with_options(prompts, **options):
    """The prompts, token ids each, with these options beside them."""
    return [{"prompt_token_ids": prompt, **options} for prompt in prompts]
