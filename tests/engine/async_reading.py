"""Reading an engine's thread: what its observers were told, what its readers put together."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import tiny

from kvreclaim import SamplingParams
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.stream import RequestStream, Update
from kvreclaim.engine.serving.thread import AsyncEngine

LIMIT_S = 300.0
"""A test that waits longer has lost an update; nothing is timed."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


class Witness:
    """An observer that remembers what it was told, and in which thread."""

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
    """What a reader put together from updates."""

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
    """Takes no step beyond this token of any output; does what it is told all the same.

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
