"""Counts of the tokens that a compression must keep: integers only, so lengths can be followed without
scores."""

from __future__ import annotations

from typing import TypedDict


class Rules(TypedDict):
    """The fields of CompressionConfig that protect."""

    sinks: int
    recent: int
    protect_prompt: bool


def kept_prompt_slots(
    *, num_tokens: int, prompt_slots: int, keep: int, sinks: int, recent: int, protect_prompt: bool
) -> int:
    """Prompt slots after a compression: equal in every head with protect_prompt. Without it heads differ,
    nothing reads the count, and it is 0 after any eviction.

    Args:
        num_tokens:     slots before, of which the first prompt_slots hold prompt tokens
        keep:           slots after, in every head; > sinks + recent
        sinks, recent:  first and last slots that always stay
        protect_prompt: prompt tokens stay before all others but sinks and recent ones
    """
    if num_tokens <= keep:
        return prompt_slots
    if not protect_prompt:
        return 0
    always = min(sinks, prompt_slots) + max(0, prompt_slots - (num_tokens - recent))
    return always + min(prompt_slots - always, keep - sinks - recent)


def candidates(
    *, num_tokens: int, prompt_slots: int, keep: int, sinks: int, recent: int, protect_prompt: bool
) -> slice:
    """Evictable slots: all between sinks and recent tokens, less a fully protected prompt. Arguments as for
    kept_prompt_slots."""
    rules = Rules(sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    left = kept_prompt_slots(num_tokens=num_tokens, prompt_slots=prompt_slots, keep=keep, **rules)
    first = max(sinks, prompt_slots) if protect_prompt and left == prompt_slots else sinks
    return slice(first, max(first, num_tokens - recent))
