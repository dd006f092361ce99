"""The engine's thread: answers as alone, aborts at any moment, and what its readers see."""

from __future__ import annotations

import asyncio
import random
import threading
from contextlib import suppress

import pytest
import tiny
from async_reading import LIMIT_S, Answer, Witness, abort_one, check_alone, new, read, run, serving
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.compression.stats import QueryStats
from kvreclaim.engine.serving.client import AsyncEngine
from kvreclaim.engine.serving.core import Update
from kvreclaim.errors import EngineDeadError, RequestTooLongError


@pytest.mark.parametrize("num_blocks", [400, 14], ids=["roomy", "preempting"])
def test_many_at_once_answer_like_alone(make_llm, num_blocks) -> None:
    lengths = [3 + (7 * i) % 60 for i in range(24)]
    compressions = [small() if i % 3 == 0 and num_blocks > 100 else None for i in range(24)]
    llm = make_llm(num_blocks=num_blocks, max_num_batched_tokens=64, block_size=8)
    alone = make_llm(num_blocks=400, max_num_batched_tokens=64, block_size=8)
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1)

    async def main() -> list[dict[int, Answer]]:
        async with serving(llm) as engine:
            specs = [
                new(f"r{i}", length, params, compression=compressions[i]) for i, length in enumerate(lengths)
            ]
            streams = await engine.add_all(specs)
            return await asyncio.gather(*(read(stream) for stream in streams))

    check_alone(alone, run(main()), lengths, params, compressions)
    assert_idle(llm)
    assert (llm.engine.totals.num_preemptions > 0) == (num_blocks == 14)


@pytest.mark.parametrize("seed", range(3))
def test_aborts_at_any_moment_leave_nothing(make_llm, seed) -> None:
    llm, witness, rng = make_llm(num_blocks=60, block_size=8), Witness(), random.Random(seed)

    async def main() -> AsyncEngine:
        async with serving(llm, witness) as engine:
            ways = ["cancel", "before", "twice", "once"]
            await asyncio.gather(*(abort_one(engine, f"r{i}", rng.choice(ways), rng) for i in range(60)))
            await engine.drained()
            await engine.call(lambda _: assert_idle(llm))
            assert engine.num_requests == engine.num_queued == 0
        return engine

    engine = run(main())
    assert not engine.host._cursors
    assert not engine._streams
    assert not engine._outbox
    assert witness.added_ids == witness.ended_ids
    assert set(witness.ended_ids.values()) == {1}
    assert witness.threads == {"kvreclaim-engine"}


def test_a_slow_reader_finds_everything_in_one_update(make_llm) -> None:
    llm = make_llm()
    params = SamplingParams(temperature=0.0, max_tokens=25, logprobs=0)

    async def main() -> Update:
        async with serving(llm) as engine:
            stream = await engine.add(new("slow", 20, params))
            await engine.drained()
            return await stream.next()

    update = run(main())
    [expected] = llm.generate(tiny.prompts((20,), seed=20), params)[0].outputs
    assert update.finished
    assert update.deltas[0].token_ids == expected.token_ids
    assert update.deltas[0].text == expected.text
    assert [list(report) for report in update.deltas[0].logprobs] == [[t] for t in expected.token_ids]
    assert update.deltas[0].finish_reason == "length"
    assert update.metrics.num_generated_tokens == 25


def test_each_output_says_once_why_it_ended(make_llm) -> None:
    llm = make_llm(max_num_seqs=8)
    params = SamplingParams(temperature=1.5, n=6, seed=3, max_tokens=30, stop=["e", "t", "a"])

    async def main() -> dict[int, Answer]:
        async with serving(llm) as engine:
            return await read(await engine.add(new("n", 20, params)))

    answers = run(main())
    expected = llm.generate(tiny.prompts((20,), seed=20), params)[0].outputs
    assert {i: a.finish_reasons for i, a in answers.items()} == {o.index: [o.finish_reason] for o in expected}
    assert {i: a.text for i, a in answers.items()} == {o.index: o.text for o in expected}


def test_the_first_and_the_last_update_bring_metrics(make_llm) -> None:
    async def main() -> list[Update]:
        async with serving(make_llm()) as engine:
            await read(await engine.add(new("first", 40)))
            engine.halt_at = 0
            stream, updates = await engine.add(new("again", 40)), []
            for engine.halt_at in range(1, 13):
                updates.append(await stream.next())
            return updates

    updates = run(main())
    assert [update.metrics is not None for update in updates] == [True, *[False] * 10, True]
    assert updates[0].metrics.num_cached_tokens == updates[-1].metrics.num_cached_tokens == 32
    assert updates[-1].metrics.num_generated_tokens == 12


def test_requests_are_added_all_or_none(make_llm) -> None:
    llm, witness = make_llm(max_model_len=64), Witness()

    async def main() -> None:
        async with serving(llm, witness) as engine:
            with pytest.raises(RequestTooLongError):
                await engine.add_all([new("a"), new("b", 65)])
            await engine.call(lambda _: assert_idle(llm))
            assert not witness.added_ids
            assert (await read(await engine.add(new("a"))))[0].finish_reasons == ["length"]

    run(main())


def test_a_new_setting_is_made_while_others_go_on(make_llm, monkeypatch) -> None:
    """Reading statistics may take long; neither a step nor the event loop waits for it."""
    llm, threads, go = make_llm("qwen3"), [], threading.Event()
    load, known = QueryStats.load, ("knorm", "streaming_llm")
    for name in known:
        llm.compressor(small(name))

    def slowly(path) -> QueryStats:
        threads.append(threading.current_thread())
        assert threads[0].name != "kvreclaim-engine"
        assert threads[0] is not threading.main_thread()
        assert go.wait(LIMIT_S)
        return load(path)

    monkeypatch.setattr(QueryStats, "load", slowly)

    async def main() -> None:
        async with serving(llm) as engine:
            adding = asyncio.ensure_future(engine.add(new("first", 60, compression=small("triattention"))))
            for name in known:
                answer = await read(await engine.add(new(name, 60, compression=small(name))))
                assert answer[0].finish_reasons == ["length"]
            assert (await read(await engine.add(new("none"))))[0].finish_reasons == ["length"]
            assert not adding.done()
            assert engine.num_requests == 1
            go.set()
            assert (await read(await adding))[0].finish_reasons == ["length"]

    run(main())
    assert len(threads) == 1


def test_calls_of_several_tasks_run_in_the_engines_thread(make_llm) -> None:
    async def main() -> None:
        async with serving(make_llm()) as engine:
            stream = await engine.add(new("busy"))
            names = await asyncio.gather(
                *(engine.call(lambda _: threading.current_thread().name) for _ in range(5))
            )
            assert set(names) == {"kvreclaim-engine"}
            with pytest.raises(ZeroDivisionError):
                await engine.call(lambda _: 1 // 0)
            assert await engine.call(lambda its: its is engine.host)
            await read(stream)

    run(main())


def test_stopping_ends_what_runs_and_refuses_the_rest(make_llm) -> None:
    llm = make_llm()
    long = SamplingParams(temperature=0.0, max_tokens=400)

    async def main() -> None:
        async with serving(llm) as engine:
            engine.halt_at = 3
            stream = await engine.add(new("long", 9, long))
            await stream.next()
            adding = asyncio.ensure_future(engine.add(new("late", 9, long)))
        assert (await read(stream))[0].finish_reasons == ["abort"]
        with suppress(EngineDeadError):
            assert (await read(await adding))[0].finish_reasons == ["abort"]
        with pytest.raises(EngineDeadError, match="shut down"):
            await engine.call(lambda _: None)

    run(main())
    assert_idle(llm)
