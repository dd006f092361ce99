"""The engine's process: answers as alone, refusals, aborts at any moment, and the death of either side."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import process_calls as calls
import psutil
import pytest
import tiny
from async_reading import LIMIT_S, Answer, abort_one, check_alone, new, read, run
from settings import small

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policies.segments import Segments
from kvreclaim.compression.policy import CompressionPolicy
from kvreclaim.engine.serving import started
from kvreclaim.engine.serving.channel import PIECE, new_bell
from kvreclaim.engine.serving.messages import Add, EngineSpec
from kvreclaim.engine.serving.process import ProcessEngine
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.errors import EngineDeadError, InvalidArgumentError, RequestTooLongError

Launch = Callable[..., ProcessEngine]


@pytest.fixture
def launch(calibrated_dir, monkeypatch) -> Launch:
    """(model, **engine options) -> an engine's process, which finds the tests' modules."""
    here = str(Path(__file__).parent)
    more = [here, str(Path(tiny.__file__).parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(part for part in more[::-1] if part))

    def start(model: str | None = None, **options) -> ProcessEngine:
        spec = EngineSpec(
            model=model or str(calibrated_dir("llama")),
            dtype="float32",
            device="cpu",
            options={"num_blocks": 200, **options},
        )
        return ProcessEngine.launch(spec)

    return start


@pytest.fixture(params=["bell", "socket"])
def waker(request, monkeypatch) -> str:
    """The waker of the event loop: the eventfd that Linux has, or the socket, as elsewhere."""
    if request.param == "socket":
        monkeypatch.setattr(started, "new_bell", lambda: None)
    elif new_bell() is None:
        pytest.skip("no eventfd here")
    return request.param


def reader_of(engine: ProcessEngine) -> tuple[int, Callable[[], None]]:
    """The file descriptor that the event loop waits for, and its callback."""
    bell = engine._wakers.bell
    if bell is None:
        return engine._channel.fileno(), engine._on_readable
    return bell, partial(engine._on_bell, bell)


@asynccontextmanager
async def serving(engine: ProcessEngine) -> AsyncIterator[ProcessEngine]:
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        assert not psutil.pid_exists(engine.pid)


@pytest.mark.parametrize("num_blocks", [400, 14], ids=["roomy", "preempting"])
def test_many_at_once_answer_like_alone(launch: Launch, make_llm, num_blocks: int) -> None:
    lengths = [3 + (7 * i) % 60 for i in range(24)]
    compressions = [small() if i % 3 == 0 and num_blocks > 100 else None for i in range(24)]
    limits = {"max_num_batched_tokens": 64, "block_size": 8}
    params = SamplingParams(temperature=0.0, max_tokens=40, logprobs=1, prompt_logprobs=1)

    async def main() -> list[tuple[dict[int, Answer], list]]:
        async with serving(launch(num_blocks=num_blocks, **limits)) as engine:
            assert await engine.call(calls.pid) == engine.pid != os.getpid()
            specs = [
                new(f"r{i}", length, params, compression=compressions[i]) for i, length in enumerate(lengths)
            ]
            streams = await engine.add_all(specs)
            answers = await asyncio.gather(*(read(stream) for stream in streams))
            assert await engine.call(calls.idle)
            assert engine.num_requests == engine.num_queued == 0
            return [(answer, stream.prompt_logprobs) for answer, stream in zip(answers, streams, strict=True)]

    alone = make_llm(num_blocks=400, **limits)
    answers, of_prompts = zip(*run(main()), strict=True)
    outputs = check_alone(alone, answers, lengths, params, compressions)
    for output, of_prompt in zip(outputs, of_prompts, strict=True):
        assert [r and set(r) for r in of_prompt] == [r and set(r) for r in output.prompt_logprobs]


def test_what_it_serves_and_refuses_is_the_engines_own(launch: Launch, make_llm) -> None:
    expected = ServedModel.of(make_llm(block_size=8, max_model_len=64))

    async def main() -> None:
        async with serving(launch(block_size=8, max_model_len=64)) as engine:
            assert engine.tokenizer.decode(engine.tokenizer.encode("hello")) == "hello"
            served, by_memory = engine.served, {"max_signal_bytes": 0}
            assert (served.vocab_size, served.max_model_len) == (expected.vocab_size, 64)
            assert (served.num_blocks, served.block_size) == (200, 8)
            assert served.config | by_memory == expected.config | by_memory
            assert served.name == expected.name
            with pytest.raises(RequestTooLongError, match="max_model_len is 64") as refused:
                await engine.add_all([new("a"), new("b", 65)])
            assert refused.value.field == "prompt"
            assert await engine.call(calls.idle)
            assert engine.num_requests == 0
            with pytest.raises(InvalidArgumentError, match="is unknown"):
                await engine.add(new("c", compression=small("nonesuch")))
            with pytest.raises(ZeroDivisionError, match="of the test"):
                await engine.call(calls.fails)
            with pytest.raises(RuntimeError, match="Unspeakable in the engine's process"):
                await engine.call(calls.fails_unspeakably)
            assert (await read(await engine.add(new("a"))))[0].finish_reasons == ["length"]

    run(main())


def test_aborts_at_any_moment_leave_nothing(launch: Launch) -> None:
    rng = random.Random(0)

    async def main() -> None:
        async with serving(launch(num_blocks=60, block_size=8)) as engine:
            ways = ["cancel", "once"]
            await asyncio.gather(*(abort_one(engine, f"r{i}", rng.choice(ways), rng) for i in range(60)))
            await engine.drained()
            await engine.abort_all()
            assert await engine.call(calls.idle)

    run(main())


def test_a_new_setting_is_made_while_others_go_on(launch: Launch, calibrated_dir, tmp_path: Path) -> None:
    """A request whose caller has gone meanwhile is never run."""
    model = tmp_path / "model"
    shutil.copytree(calibrated_dir("qwen3"), model)

    async def main() -> None:
        async with serving(launch(str(model))) as engine:
            await engine.call(calls.loads_slowly)
            slow = small("triattention")
            adding = asyncio.ensure_future(engine.add(new("first", 60, compression=slow)))
            leaving = asyncio.ensure_future(engine.add(new("second", 60, compression=slow)))
            assert (await read(await engine.add(new("none"))))[0].finish_reasons == ["length"]
            assert not adding.done()
            leaving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await leaving
            (model / "go").touch()
            assert (await read(await adding))[0].finish_reasons == ["length"]
            await engine.drained()
            assert await engine.call(calls.idle)

    run(main())


def test_the_engine_goes_on_while_the_loop_does_not_read(launch: Launch, waker: str) -> None:
    """The engine goes on, and what it made comes in few pieces."""
    params = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True, logprobs=20)

    async def main() -> None:
        async with serving(launch(num_blocks=2000, max_model_len=512)) as engine:
            loop = asyncio.get_running_loop()
            streams = await engine.add_all([new(f"r{i}", 20, params) for i in range(8)])
            fileno, on_readable = reader_of(engine)
            loop.remove_reader(fileno)
            child = psutil.Process(engine.pid)
            while child.status() != psutil.STATUS_SLEEPING or child.num_ctx_switches().voluntary < 3:
                await asyncio.sleep(0.05)
            pieces, receive = [], engine._channel.receive

            def counted() -> list:
                messages = receive()
                pieces.extend(messages)
                return messages

            engine._channel.receive = counted
            loop.add_reader(fileno, on_readable)
            answers = await asyncio.gather(*(read(stream) for stream in streams))
            assert all(len(answer[0].token_ids) == 400 for answer in answers)
            assert len({tuple(answer[0].token_ids) for answer in answers}) == 1
            assert len(pieces) < await engine.call(calls.num_steps)

    run(main())


def test_what_is_larger_than_a_piece_comes_whole(launch: Launch, waker: str) -> None:
    """There is one ring for many pieces, while updates of others come between."""
    size = 5 * PIECE + 3

    async def main() -> None:
        async with serving(launch(num_blocks=400)) as engine:
            stream = await engine.add(new("a", params=SamplingParams(max_tokens=200, ignore_eos=True)))
            found = await asyncio.gather(*(engine.call(partial(calls.zeros, size)) for _ in range(3)))
            assert [len(each) for each in found] == [size] * 3
            answer = await read(stream)
            assert len(answer[0].token_ids) == 200

    run(main())


def test_its_last_messages_are_read(launch: Launch, waker: str) -> None:
    """Killed while no reader was attached: its messages come before the error."""
    endless = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)

    async def main() -> None:
        async with serving(launch(num_blocks=400)) as engine:
            await engine.call(calls.slow_down)
            stream = await engine.add(new("a", params=endless))
            await stream.next()
            fileno, on_readable = reader_of(engine)
            loop = asyncio.get_running_loop()
            loop.remove_reader(fileno)
            while not engine._channel.readable:
                await asyncio.sleep(0.01)
            os.kill(engine.pid, signal.SIGKILL)
            await asyncio.to_thread(engine._process.wait)
            if not engine.lost.is_set():
                loop.add_reader(fileno, on_readable)
            updates = [update async for update in stream]
            assert sum(len(d.token_ids) for update in updates for d in update.deltas.values()) > 0
            assert "ended by signal 9" in updates[-1].error

    run(main())


def test_a_panic_ends_every_request_and_is_reported(launch: Launch) -> None:
    """A BaseException that is no Exception, as a library's panic, ends the engine, not its process."""
    endless = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)

    async def main() -> None:
        async with serving(launch(num_blocks=400)) as engine:
            stream = await engine.add(new("a", params=endless))
            panicking = asyncio.ensure_future(engine.call(calls.panics))
            behind = asyncio.ensure_future(engine.call(calls.pid))
            async for update in stream:
                last = update
            assert last.error == "SystemExit: no Exception"
            assert engine.death == "SystemExit"
            with pytest.raises(EngineDeadError, match=r"\(SystemExit\); restart the server"):
                await engine.add(new("b"))
            assert await engine.call(calls.pid, allow_dead=True) == engine.pid
            for call in (panicking, behind):
                with pytest.raises(EngineDeadError, match=r"\(SystemExit\); restart the server"):
                    await call
            assert not engine.lost.is_set()

    run(main())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_process_that_dies_fails_every_request(launch: Launch, number: signal.Signals, waker: str) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)

    async def main() -> None:
        async with serving(launch(num_blocks=400)) as engine:
            streams = await engine.add_all([new("a", params=endless), new("b", params=endless)])
            await streams[0].next()
            os.kill(engine.pid, number)
            for stream in streams:
                async for update in stream:
                    last = update
                assert f"ended by signal {number.value}" in last.error
            assert engine.lost.is_set()
            for call in (
                engine.add(new("c")),
                engine.call(calls.pid),
                engine.call(calls.pid, allow_dead=True),
            ):
                with pytest.raises(EngineDeadError, match="restart the server"):
                    await call
            engine.abort("a")
            await engine.drained()

    run(main())


def test_it_ends_when_the_server_goes(launch: Launch) -> None:
    endless = SamplingParams(temperature=0.0, max_tokens=3000, ignore_eos=True)

    async def main() -> int:
        engine = launch(num_blocks=400)
        engine.start()
        await engine.add(new("a", params=endless))
        asyncio.get_running_loop().remove_reader(reader_of(engine)[0])
        engine._channel.close()
        return await asyncio.to_thread(engine._process.wait, LIMIT_S)

    assert run(main()) == 0


def test_a_model_that_is_none_is_refused_in_the_same_words(launch: Launch, make_llm, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError) as alone:
        LLM(str(tmp_path / "none"))
    with pytest.raises(InvalidArgumentError) as refused:
        launch(str(tmp_path / "none"))
    assert str(refused.value) == str(alone.value)


def test_a_process_that_ends_before_it_serves_is_one_sentence(launch: Launch, monkeypatch) -> None:
    monkeypatch.setattr(started, "PROGRAM", ("-c", "raise SystemExit(7)"))
    with pytest.raises(EngineDeadError, match="ended with exit code 7 before it served; the log may say why"):
        launch()


@pytest.mark.parametrize("place", [{"__module__": "__main__"}, {"__qualname__": "f.<locals>.Mine"}])
def test_a_policy_object_that_no_module_holds_is_refused(place) -> None:
    cls = dataclass(frozen=True)(type("Mine", (CompressionPolicy,), {"name": "mine", "score": None, **place}))
    for policy in (cls(), Segments(cls())):
        config = CompressionConfig(policy)
        with pytest.raises(
            InvalidArgumentError, match=r"policy Mine is defined .* move the class to a module"
        ):
            EngineSpec(model="m", compression=config)
        with pytest.raises(InvalidArgumentError, match="which the engine's process cannot load"):
            Add(1, [replace(new("a"), compression=config)])
    EngineSpec(model="m", compression=CompressionConfig(Segments(Knorm())))
