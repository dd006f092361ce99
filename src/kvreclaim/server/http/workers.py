"""Threads for work that would block the event loop: parsing, templates, tokenizing, encoding long answers."""

from __future__ import annotations

import asyncio
import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

SMALL = 4096
"""Bytes or characters up to which work runs inline: a thread's wake-up takes longer."""


def default_threads() -> int:
    """Return one per core, and at least two, because a tenant may not take the last free thread."""
    return min(8, max(2, os.cpu_count() or 1))


class Workers:
    """A thread pool with one queue per tenant, served round robin. No tenant may take the last free thread.

    All methods run in one event loop.
    """

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 2, num_threads
        self.most_per_tenant = num_threads - 1
        self.running: Counter[str | None] = Counter()
        self._free = num_threads
        self._waiting: OrderedDict[str | None, deque[asyncio.Future[None]]] = OrderedDict()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="kvreclaim-worker")

    async def run(self, tenant: str | None, work: Callable[[], T], size: int | None = None) -> T:
        """Run the work in a thread, when it is the tenant's turn. Raises what it raises.

        A cancelled call holds its thread until the work ends.
        size: in bytes or characters; small work may run inline
        """
        if size is not None and size <= SMALL:
            return work()
        await self._turn(tenant)
        loop = asyncio.get_running_loop()
        try:
            done: Future[T] = self._pool.submit(work)
        except BaseException:
            self._give_back(tenant)
            raise

        def ended(_: Future[T]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._give_back, tenant)

        done.add_done_callback(ended)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Start no more work; returns at once."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _turn(self, tenant: str | None) -> None:
        """Wait until a thread is taken for this tenant."""
        if tenant not in self._waiting and self._may(tenant):
            self._take(tenant)
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._give_back(tenant)  # cancelled just when its turn came
            raise

    def _may(self, tenant: str | None) -> bool:
        return self._free > 0 and self.running[tenant] < self.most_per_tenant

    def _take(self, tenant: str | None) -> None:
        self._free -= 1
        self.running[tenant] += 1

    def _give_back(self, tenant: str | None) -> None:
        self._free += 1
        self.running[tenant] -= 1
        if not self.running[tenant]:
            del self.running[tenant]
        while self._free and self._wake_next():
            pass

    def _wake_next(self) -> bool:
        """Give a thread to the tenant that has waited longest and may have one."""
        for tenant, queue in list(self._waiting.items()):
            while queue and queue[0].done():
                queue.popleft()  # cancelled while waiting
            if not queue:
                del self._waiting[tenant]
            elif self._may(tenant):
                queue.popleft().set_result(None)
                self._take(tenant)
                if queue:
                    self._waiting.move_to_end(tenant)
                else:
                    del self._waiting[tenant]
                return True
        return False
