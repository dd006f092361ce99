"""What the pool holds of one sequence, against trying every length."""

from __future__ import annotations

import pytest

from kvreclaim.memory.windows import Window
from kvreclaim.schedule import EvictionMethod, Footprint
from kvreclaim.schedule.budget.footprint import excess_slots, longest_sequence

PLAIN = Footprint(block_size=4, max_chunk=8)
BOUNDED = Footprint(EvictionMethod.COMPACT, budget=12, interval=6, block_size=4, max_chunk=8)
PROMPT_ONLY = Footprint(EvictionMethod.COMPACT, budget=12, prompt_only=True, block_size=4, max_chunk=8)
WINDOWED = Footprint(block_size=4, max_chunk=8, windows=(Window(6, 2),))
TRAILING = Footprint(block_size=4, max_chunk=8, trailing=Window(6))


@pytest.mark.parametrize("footprint", [PLAIN, BOUNDED, PROMPT_ONLY, WINDOWED, TRAILING])
@pytest.mark.parametrize("num_blocks", [4, 5, 9, 30])
def test_it_is_the_last_length_that_fits(footprint: Footprint, num_blocks: int) -> None:
    limit = 70
    for prompt in (None, 1, 9, 15):
        fits = [
            length
            for length in range(1, limit + 1)
            if excess_slots(prompt or length, length, footprint, num_blocks) <= 0
        ]
        assert longest_sequence(prompt, limit, footprint, num_blocks) == max(fits, default=0)


@pytest.mark.parametrize("footprint", [PLAIN, BOUNDED, PROMPT_ONLY, WINDOWED, TRAILING])
@pytest.mark.parametrize("num_blocks", [4, 5, 9, 30])
def test_no_prompt_makes_it_less_than_what_holds_for_all(footprint: Footprint, num_blocks: int) -> None:
    limit = 70
    for_all = longest_sequence(None, limit, footprint, num_blocks)
    each = [longest_sequence(prompt, limit, footprint, num_blocks) for prompt in range(1, limit)]
    assert min(each[: max(0, for_all - 1)], default=for_all) >= for_all
