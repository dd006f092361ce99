from __future__ import annotations

import pytest

from kvreclaim.memory.eviction.lru import FreeQueue


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
