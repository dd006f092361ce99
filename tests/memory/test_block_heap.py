from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvreclaim.memory.block_heap import BlockHeap

STEPS = st.lists(st.tuples(st.sampled_from(["push", "remove", "pop"]), st.integers(0, 9), st.integers(0, 5)))


@given(steps=STEPS)
def test_it_is_a_sorted_dict(steps):
    heap: BlockHeap[int] = BlockHeap()
    keys: dict[int, int] = {}
    for step, block, key in steps:
        smallest = min(((key, block) for block, key in keys.items()), default=None)
        assert heap.first() == smallest
        if step == "push":
            heap.push(block, key)
            keys[block] = key
        elif step == "remove" and block in keys:
            heap.remove(block)
            del keys[block]
        elif step == "pop" and smallest is not None:
            assert heap.pop() == smallest[1]
            del keys[smallest[1]]
        heap.check()
        assert len(heap) == len(keys)
        assert list(heap) == sorted(keys, key=lambda block: (keys[block], block))
        assert all((block in heap) == (block in keys) for block in range(10))
        assert all(heap.key(block) == key for block, key in keys.items())


def test_what_is_popped_leaves_no_more_dead_items_than_allowed():
    """Few blocks change their keys often, then the smallest keys leave: the dead items lie behind them."""
    heap: BlockHeap[int] = BlockHeap()
    for block in range(50):
        heap.push(block, block)
    for key in range(100, 210):
        heap.push(49, key)
    for block in range(49):
        assert heap.pop() == block
        heap.check()
