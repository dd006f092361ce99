"""Threads in which tenants take turns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from web import LIMIT_S

from kvreclaim.server.http.workers import SMALL, Workers, default_threads


def run(play: Callable[[Workers], Coroutine[Any, Any, None]], num_threads: int = 2) -> None:
    async def main() -> None:
        workers = Workers(num_threads)
        try:
            await asyncio.wait_for(play(workers), LIMIT_S)
        finally:
            workers.close()

    asyncio.run(main())


class Gated:
    """Work that waits for its turn to end; order: the names of those begun."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.order: list[str] = []

    def work(self, name: str) -> Callable[[], str]:
        def do() -> str:
            self.order.append(name)
            assert self.go.wait(LIMIT_S)
            return name

        return do


async def settled(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_it_returns_and_raises_what_the_work_does():
    async def play(workers: Workers) -> None:
        assert await workers.run("a", lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            await workers.run("a", lambda: 1 // 0)
        await settled(lambda: not workers.running)

    run(play)


def test_little_work_is_done_at_once():
    async def play(workers: Workers) -> None:
        here = threading.current_thread()
        assert await workers.run(None, threading.current_thread, size=SMALL) is here
        assert await workers.run(None, threading.current_thread, size=SMALL + 1) is not here
        assert await workers.run(None, threading.current_thread) is not here

    run(play)


def test_one_tenant_leaves_a_thread_to_the_others():
    async def play(workers: Workers) -> None:
        gated = Gated()
        first = [asyncio.ensure_future(workers.run("a", gated.work("a"))) for _ in range(5)]
        await settled(lambda: workers.running["a"] == 2)
        await asyncio.sleep(0)
        assert workers.running == {"a": 2}
        assert await workers.run("b", lambda: "b") == "b"
        gated.go.set()
        assert await asyncio.gather(*first) == ["a"] * 5

    run(play, num_threads=3)


def test_tenants_take_turns():
    """However much one of them has waiting."""

    async def play(workers: Workers) -> None:
        held, gated = Gated(), Gated()
        gated.go.set()
        holding = [asyncio.ensure_future(workers.run(name, held.work(name))) for name in "xy"]
        await settled(lambda: len(held.order) == 2)
        waiting = [asyncio.ensure_future(workers.run("a", gated.work("a"))) for _ in range(4)]
        waiting += [asyncio.ensure_future(workers.run(name, gated.work(name))) for name in "bc"]
        await asyncio.sleep(0)
        held.go.set()
        await asyncio.gather(*holding, *waiting)
        assert sorted(gated.order) == list("aaaabc")
        assert set(gated.order[:3]) == set("abc")

    run(play)


def test_who_is_cancelled_gives_up_its_turn_but_not_what_it_has_begun():
    async def play(workers: Workers) -> None:
        gated = Gated()
        begun = asyncio.ensure_future(workers.run("a", gated.work("begun")))
        await settled(lambda: gated.order == ["begun"])
        waits = asyncio.ensure_future(workers.run("a", gated.work("never")))
        await asyncio.sleep(0)
        for each in (begun, waits):
            each.cancel()
        await asyncio.gather(begun, waits, return_exceptions=True)
        assert workers.running == {"a": 1}, "its thread is busy still"
        gated.go.set()
        await settled(lambda: not workers.running)
        assert gated.order == ["begun"]
        assert await workers.run("a", lambda: 1) == 1

    run(play)


def test_there_are_two_threads_at_least():
    assert 2 <= default_threads() <= 8
