"""What one sequence can be at most, from its footprint and the pool alone."""

from __future__ import annotations

from kvreclaim.memory.blocks import blocks_for
from kvreclaim.schedule.footprint import Footprint


def excess_slots(num_prompt: int, length: int, footprint: Footprint, num_blocks: int) -> int:
    """Slots that the whole pool lacks for a sequence on its way to this length; not positive: none."""
    needed = footprint.slots_needed(num_prompt, length)
    if footprint.windows:
        needed = blocks_for(needed, footprint.block_size) * footprint.block_size + footprint.window_slots(
            length
        )
    return needed - num_blocks * footprint.block_size


def longest_output(num_prompt: int, limit: int, footprint: Footprint, num_blocks: int) -> int:
    """Tokens, prompt included, that the pool can hold of one sequence, `limit` at most."""
    excess = excess_slots(num_prompt, limit, footprint, num_blocks)
    if excess <= 0:
        return limit
    if not footprint.windows and not footprint.trailing:
        return num_blocks * footprint.block_size if footprint.bounded else limit - excess
    low, high = 1, limit  # the windows' part grows with the length, too
    while high - low > 1:
        middle = (low + high) // 2
        fits = excess_slots(num_prompt, middle, footprint, num_blocks) <= 0
        low, high = (middle, high) if fits else (low, middle)
    return low


def most_blocks(width: int, num_prompt: int, length: int, footprint: Footprint) -> int:
    """That so many sequences of this length take, which share a prompt's full blocks until a pass makes a
    block their own."""
    size = footprint.block_size
    windows = width * (footprint.window_slots(length) // size)
    each = blocks_for(footprint.slots_needed(num_prompt, length), size)
    first_pass = footprint.first_pass(num_prompt)
    if footprint.way.moves and first_pass is not None and first_pass < length:
        return windows + width * each
    shared = num_prompt // size
    return windows + shared + width * (blocks_for(length, size) - shared)
