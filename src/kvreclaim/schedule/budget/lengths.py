"""The longest possible sequence, from its footprint and the pool alone."""

from __future__ import annotations

from bisect import bisect_right

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.schedule.budget.footprint import Footprint


def excess_slots(num_prompt: int, length: int, footprint: Footprint, num_blocks: int) -> int:
    """Slots that the whole pool lacks for a sequence on its way to this length; not positive: enough."""
    needed = footprint.slots_needed(num_prompt, length)
    if footprint.windows:
        needed = blocks_for(needed, footprint.block_size) * footprint.block_size + footprint.window_slots(
            length
        )
    return needed - num_blocks * footprint.block_size


def longest_sequence(num_prompt: int | None, limit: int, footprint: Footprint, num_blocks: int) -> int:
    """Most tokens, prompt included, of one sequence in the pool, at most `limit`.

    num_prompt: tokens of its prompt; None: any number
    """

    def excess(length: int) -> int:
        prompt = length if num_prompt is None else num_prompt
        return excess_slots(prompt, length, footprint, num_blocks)

    return bisect_right(range(1, limit + 1), 0, key=excess)


def most_blocks(width: int, num_prompt: int, length: int, footprint: Footprint) -> int:
    """Blocks of that many sequences of this length, which share a prompt's full blocks until a pass makes a
    block their own."""
    size = footprint.block_size
    windows = width * (footprint.window_slots(length) // size)
    each = blocks_for(footprint.slots_needed(num_prompt, length), size)
    first_pass = footprint.first_pass(num_prompt)
    if footprint.eviction_method.moves and first_pass is not None and first_pass < length:
        return windows + width * each
    shared = num_prompt // size
    return windows + shared + width * (blocks_for(length, size) - shared)
