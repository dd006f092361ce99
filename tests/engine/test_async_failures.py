"""The engine's thread when something in it fails: which requests get the error, and which go on."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
import tiny
from async_reading import GREEDY, LIMIT_S, Answer, Witness, new, read, run, serving
from settings import assert_idle

from kvreclaim.engine.serving.core import Update
from kvreclaim.errors import EngineDeadError


def test_a_step_that_fails_ends_what_is_in_flight_and_nothing_else(make_llm, monkeypatch, caplog) -> None:
    llm, witness = make_llm(), Witness()
    real = llm.engine.step
    plan = iter(["ok", "ok", "fail"])

    def step():
        if next(plan, "ok") == "fail":
            raise ZeroDivisionError("of the test")
        return real()

    monkeypatch.setattr(llm.engine, "step", step)

    async def main() -> tuple[list[Update], dict[int, Answer]]:
        async with serving(llm, witness) as engine:
            streams = await engine.add_all([new("a", 9), new("b", 30)])
            last = [[update async for update in stream][-1] for stream in streams]
            await engine.call(lambda _: assert_idle(llm))
            return last, await read(await engine.add(new("c", 9)))

    last, after = run(main())
    assert [update.error for update in last] == ["ZeroDivisionError: of the test"] * 2
    monkeypatch.undo()
    assert after[0].token_ids == llm.generate(tiny.prompts((9,), seed=9), GREEDY)[0].outputs[0].token_ids
    assert witness.ended_ids == Counter("abc")
    assert "ending requests ['a', 'b']" in caplog.text


def test_what_ended_in_a_step_that_then_failed_is_reported(make_llm, monkeypatch) -> None:
    llm = make_llm()
    real = llm.engine.step

    def step():
        result = real()
        if result.requests and result.requests[0].finished:
            raise ZeroDivisionError("after the fact")
        return result

    monkeypatch.setattr(llm.engine, "step", step)

    async def main() -> dict[int, Answer]:
        async with serving(llm) as engine:
            return await read(await engine.add(new("a")))

    assert run(main())[0].finish_reasons == ["length"]


def test_a_dead_engine_tells_everybody(make_llm, monkeypatch) -> None:
    llm, witness, stepping, go = make_llm(), Witness(), threading.Event(), threading.Event()

    def broken(*_):
        stepping.set()
        go.wait(LIMIT_S)
        raise ZeroDivisionError("broken")

    monkeypatch.setattr(llm.engine, "step", broken)
    monkeypatch.setattr(llm.engine, "abort", broken)

    async def main() -> None:
        async with serving(llm, witness) as engine:
            streams = await engine.add_all([new("a"), new("b")])
            await asyncio.to_thread(stepping.wait, LIMIT_S)
            waiting = asyncio.ensure_future(engine.call(lambda _: 1))
            await asyncio.sleep(0)
            go.set()
            for stream in streams:
                update = await stream.next()
                assert update.finished
                assert update.error == "ZeroDivisionError: broken"
            with pytest.raises(EngineDeadError, match=r"\(ZeroDivisionError\)"):
                await waiting
            with pytest.raises(EngineDeadError, match="restart the server"):
                await engine.add(new("c"))
            engine.abort("a")
            await engine.abort_all()
            await engine.drained()
            assert engine.death == "ZeroDivisionError"
        assert witness.ended_ids == Counter("ab")

    run(main())


def test_an_observer_that_fails_harms_no_request(make_llm, caplog) -> None:
    class Clumsy(Witness):
        def stepped(self, engine, result) -> None:
            raise RuntimeError("clumsy")

    async def main() -> dict[int, Answer]:
        async with serving(make_llm(), Clumsy(), witness) as engine:
            return await read(await engine.add(new("a")))

    witness = Witness()
    assert run(main())[0].finish_reasons == ["length"]
    assert witness.num_steps > 0
    assert "Clumsy failed" in caplog.text
