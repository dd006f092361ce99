"""Which tokens a compression must keep, as counts: integers only, so that whoever holds the blocks can follow
the lengths of a sequence without its scores."""

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
    """Prompt slots left after a compression: with protect_prompt the same in every head. Without it heads
    differ, nothing reads the count, and it is 0 once anything goes.

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
    """Slots that may go: all between sinks and recent tokens, less a prompt that stays whole. Arguments as
    for kept_prompt_slots."""
    rules = Rules(sinks=sinks, recent=recent, protect_prompt=protect_prompt)
    left = kept_prompt_slots(num_tokens=num_tokens, prompt_slots=prompt_slots, keep=keep, **rules)
    first = max(sinks, prompt_slots) if protect_prompt and left == prompt_slots else sinks
    return slice(first, max(first, num_tokens - recent))
