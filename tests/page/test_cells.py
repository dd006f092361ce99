"""The pool as cells, against a slow count."""

from __future__ import annotations

import zlib
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreclaim.page import frames as module
from kvreclaim.page.frames import MAX_CELLS, NUM_STATES, count_states, group_size, num_shown, to_cells
from kvreclaim.page.view import FREE, IN_USE, SHARED

BLOCK = st.tuples(st.integers(0, NUM_STATES - 1), st.integers(0, 3))


def pool(blocks: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """States and owners; only what is referenced has an owner."""
    state = np.array([state for state, _ in blocks], np.uint8)
    owner = np.array([who if state >= IN_USE else -1 for state, who in blocks], np.int32)
    return state, owner


@pytest.mark.parametrize(
    ("num_blocks", "group"), [(1, 1), (8192, 1), (8193, 2), (100_000, 13), (10**7, 1221)]
)
def test_a_canvas_has_at_most_8192_cells(num_blocks: int, group: int) -> None:
    assert group_size(num_blocks) == group
    assert -(-num_blocks // group) <= MAX_CELLS


@pytest.mark.parametrize(
    ("used", "num_blocks", "shown"),
    [([], 9, 9), ([], 5000, 256), ([255], 5000, 256), ([3, 256], 5000, 512), ([4999], 5000, 5000)],
)
def test_blocks_behind_the_last_one_in_use_are_not_drawn(
    used: list[int], num_blocks: int, shown: int
) -> None:
    state = np.full(num_blocks, FREE, np.uint8)
    state[used] = IN_USE
    assert num_shown(state) == shown


@given(st.lists(BLOCK, min_size=1, max_size=50))
def test_a_small_pool_is_shown_block_by_block(blocks: list[tuple[int, int]]) -> None:
    state, owner = pool(blocks)
    cells = to_cells(state, owner, 4)
    assert cells.counts is None
    assert cells.state.tolist() == state.tolist()
    assert cells.owner.tolist() == [who + 1 for who in owner.tolist()]
    names = Counter(module.STATE_NAMES[code] for code in state.tolist())
    assert {name: n for name, n in count_states(state).items() if n} == names


@settings(deadline=None)
@given(blocks=st.lists(BLOCK, min_size=9, max_size=60))
def test_a_large_pool_shows_what_most_blocks_of_a_cell_are(blocks: list[tuple[int, int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CELLS", 8)
        state, owner = pool(blocks)
        group = group_size(len(blocks))
        cells = to_cells(state, owner, 4)
    assert cells.group == group
    assert cells.counts is not None
    for cell in range(-(-len(blocks) // group)):
        part = slice(cell * group, (cell + 1) * group)
        counted = Counter(state[part].tolist())
        assert cells.counts[cell].tolist() == [counted[code] for code in range(NUM_STATES)]
        kinds = Counter(
            (code, who + 1 if code == IN_USE else 0)
            for code, who in zip(state[part].tolist(), owner[part].tolist(), strict=True)
            if code != FREE
        )
        shown = (int(cells.state[cell]), int(cells.owner[cell]))
        if not kinds:
            assert shown == (FREE, 0)
        else:
            assert kinds[shown] == max(kinds.values())


def test_cells_are_packed_as_the_page_unpacks_them() -> None:
    state = np.array([IN_USE, IN_USE, SHARED, FREE, FREE], np.uint8)
    owner = np.array([1, 1, 0, -1, -1], np.int32)
    assert zlib.decompress(to_cells(state, owner, 2).pack()) == (
        np.array([2, 2, 1, 0, 0], "<u2").tobytes() + state.tobytes()
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MAX_CELLS", 3)
        packed = to_cells(state, owner, 2).pack()
    counts = [[0, 0, 0], [0, 0, 0], [2, 0, 0], [0, 1, 0]]  # cached, pinned, in use, shared
    assert zlib.decompress(packed) == (
        np.array([2, 0, 0], "<u2").tobytes()
        + np.array(counts, "<u2").tobytes()
        + np.array([IN_USE, SHARED, FREE], np.uint8).tobytes()
    )
