from __future__ import annotations

import pytest

from kvreclaim.memory.free_queue import FreeQueue


def test_begins_in_ascending_order():
    assert list(FreeQueue(4)) == [0, 1, 2, 3]


def test_config_options_the_head_and_appends_at_the_tail():
    queue = FreeQueue(3)
    assert [queue.pop_front(), queue.pop_front()] == [0, 1]
    queue.push_back(1)
    queue.push_back(0)
    assert list(queue) == [2, 1, 0]
    assert len(queue) == 3
    queue.check()


@pytest.mark.parametrize(("block", "rest"), [(0, [1, 2, 3]), (2, [0, 1, 3]), (3, [0, 1, 2])])
def test_removes_anywhere(block, rest):
    queue = FreeQueue(4)
    queue.remove(block)
    assert list(queue) == rest
    assert block not in queue
    assert all(other in queue for other in rest)
    queue.check()


def test_a_single_block_leaves_and_comes_back():
    queue = FreeQueue(1)
    assert queue.pop_front() == 0
    assert list(queue) == []
    queue.check()
    queue.push_back(0)
    assert list(queue) == [0]
    queue.check()


def test_refuses_what_would_break_the_ring():
    queue = FreeQueue(2)
    with pytest.raises(AssertionError, match="block 1 is queued already"):
        queue.push_back(1)
    queue.remove(1)
    with pytest.raises(AssertionError, match="block 1 is not queued"):
        queue.remove(1)
    queue.remove(0)
    with pytest.raises(AssertionError, match="empty"):
        queue.pop_front()


@pytest.mark.parametrize("links", ["_next", "_prev"])
def test_check_sees_a_broken_link(links):
    queue = FreeQueue(4)
    getattr(queue, links)[1] = 3
    with pytest.raises(AssertionError):
        queue.check()
