"""Reading an engine's thread: the calls of its observers, the answers of its readers."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import tiny

from kvreclaim import LLM, SamplingParams
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.client import AsyncEngine, EngineClient, RequestStream
from kvreclaim.engine.serving.core import Update

LIMIT_S = 300.0
"""A test that waits longer has lost an update; nothing is timed."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


class Witness:
    """An observer that records its calls, and their thread."""

    def __init__(self) -> None:
        self.added_ids: Counter[str] = Counter()
        self.ended_ids: Counter[str] = Counter()
        self.num_steps = 0
        self.threads: set[str] = set()

    def added(self, engine, request) -> None:
        self._note(self.added_ids, request)

    def stepped(self, engine, result) -> None:
        self.num_steps += 1

    def ended(self, engine, request) -> None:
        assert request.finished or request.error is not None
        self._note(self.ended_ids, request)

    def _note(self, counter: Counter[str], request) -> None:
        counter[request.request_id] += 1
        self.threads.add(threading.current_thread().name)


@dataclass
class Answer:
    """The text, tokens and ends that a reader put together from updates."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict] = field(default_factory=list)
    finish_reasons: list[str] = field(default_factory=list)


def take(answers: dict[int, Answer], update: Update) -> None:
    for index, delta in update.deltas.items():
        answer = answers.setdefault(index, Answer())
        answer.text += delta.text
        answer.token_ids += delta.token_ids
        answer.logprobs += delta.logprobs or ()
        answer.finish_reasons += [delta.finish_reason] if delta.finish_reason else []


async def read(stream: RequestStream) -> dict[int, Answer]:
    answers: dict[int, Answer] = {}
    async for update in stream:
        take(answers, update)
    return answers


class Halting(AsyncEngine):
    """Takes no step beyond this token of any output; handles messages all the same.

    halt_at: None does not halt
    """

    halt_at: int | None = None

    def __init__(self, llm, observers) -> None:
        super().__init__(llm, observers)
        self._next_step, self.host.step = self.host.step, self._step_or_wait

    def _step_or_wait(self) -> None:
        outputs = [seq for request in self.host.engine.requests.values() for seq in request.sequences]
        if self.halt_at is None or any(seq.num_generated < self.halt_at for seq in outputs):
            self._next_step()
        else:
            time.sleep(0.001)


@asynccontextmanager
async def serving(llm, *observers) -> AsyncIterator[Halting]:
    engine = Halting(llm, observers)
    engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, LIMIT_S))


def new(name: str, length: int = 9, params: SamplingParams = GREEDY, **fields) -> RequestSpec:
    prompt = tiny.prompts((length,), seed=length)[0]
    return RequestSpec(request_id=name, prompt_token_ids=prompt, params=params, **fields)


async def abort_one(engine: EngineClient, name: str, how: str, rng: random.Random) -> None:
    """Add a request and abort it: before, once or twice while it runs, or by cancelling its adding."""
    drawn = SamplingParams(temperature=1.0, n=3, seed=1, max_tokens=20)
    each = new(name, rng.randrange(1, 60), rng.choice([GREEDY, drawn]))
    if how == "cancel":
        task = asyncio.ensure_future(engine.add(each))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        task.cancel()
        with suppress(asyncio.CancelledError):
            engine.abort((await task).request_id)
        return
    if how == "before":
        engine.abort(name)
    stream = await engine.add(each)
    for _ in range(rng.randrange(6)):
        if (await stream.next()).finished:
            break
    engine.abort(name)
    if how == "twice":
        engine.abort(name)


def check_alone(alone: LLM, answers: list[dict[int, Answer]], lengths, params, compressions) -> list:
    """Each answer is what its request gets alone. Returns: the outputs alone."""
    outputs = []
    for answer, length, compression in zip(answers, lengths, compressions, strict=True):
        (output,) = alone.generate(tiny.prompts((length,), seed=length), params, compression)
        (expected,) = output.outputs
        assert list(answer) == [0]
        assert answer[0].token_ids == expected.token_ids
        assert answer[0].text == expected.text
        assert [set(report) for report in answer[0].logprobs] == [set(r) for r in expected.logprobs]
        assert answer[0].finish_reasons == [expected.finish_reason]
        outputs.append(output)
    return outputs
