"""The engine in a process of its own, for callers in an event loop. No parser shares its interpreter."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import select
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.channel import Channel, ChannelClosedError, ring
from kvreclaim.engine.serving.client import EngineClient
from kvreclaim.engine.serving.core import EngineCore
from kvreclaim.engine.serving.messages import (
    Abort,
    Add,
    Call,
    CallReply,
    EngineSpec,
    EngineUpdate,
    Ready,
    Stop,
)
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.engine.serving.started import StartedProcess
from kvreclaim.errors import EngineDeadError
from kvreclaim.model.loader import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_S = 10.0
"""Seconds after a Stop message until a process that has not ended is killed; a step may take any time."""


class ProcessEngine(EngineClient):
    """An AsyncEngine over a pair of sockets. If either process ends, the other one notices at once.

    The event loop waits for the bell, if there is one, and reads until the socket is empty. The process holds
    the only write end of a pipe, so the end of the process closes the pipe.
    """

    def __init__(self, started: StartedProcess, served: ServedModel, tokenizer: Tokenizer | None) -> None:
        super().__init__(tokenizer, started.process.pid)
        self._served = served
        self._process, self._channel, self._wakers = started.process, started.channel, started.wakers
        self._tickets = itertools.count()
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._queued = 0
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def launch(cls, spec: EngineSpec, started: StartedProcess | None = None) -> ProcessEngine:
        """Load a model in a started or new process. This side loads the tokenizer meanwhile.

        Raises: what LLM raises; EngineDeadError if the process ends before it serves.
        """
        started = started or StartedProcess()
        with started:
            try:
                started.channel.send(spec)
                with ThreadPoolExecutor(1) as executor:
                    loading = executor.submit(load_tokenizer, spec.model)
                    ready = _await_ready(started.channel)
                if ready.error is not None:
                    raise ready.error
                assert ready.served is not None, "an engine that serves says what"
                return cls(started, ready.served, loading.result())
            except ChannelClosedError as error:
                ended = _how(started.process.wait())
                raise EngineDeadError(
                    f"the engine's process ended {ended} before it served; the log may say why."
                ) from error

    @property
    def served(self) -> ServedModel:
        return self._served

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._wakers.bell is None:
            self._loop.add_reader(self._channel.fileno(), self._on_readable)
        else:
            self._loop.add_reader(self._wakers.bell, self._on_bell, self._wakers.bell)
            self._loop.add_reader(self._wakers.life, self._on_end)
            ring(self._wakers.bell)  # for messages that arrived before

    async def stop(self) -> None:
        self.death = self.death or "it was shut down"
        self._stopping = True
        if not self.lost.is_set():
            self._send(Stop())
        try:
            await asyncio.to_thread(self._process.wait, STOP_S)
        except subprocess.TimeoutExpired:
            logger.warning("the engine's process did not stop in %g s and is killed", STOP_S)
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        self._lose()

    def abort(self, request_id: str) -> None:
        self._send(Abort(request_id))

    async def call(self, function: Callable[[EngineCore], T], *, allow_dead: bool = False) -> T:
        if not allow_dead:
            self._check_alive()
        result: T = await self._request(lambda ticket: Call(ticket, function, allow_dead))
        return result

    @property
    def _num_waiting(self) -> int:
        return self._queued

    async def _add(self, news: Sequence[RequestSpec]) -> None:
        await self._request(lambda ticket: Add(ticket, news))

    async def _request(self, message: Callable[[int], Add | Call]) -> Any:
        """Send a message and wait for its reply."""
        if self.lost.is_set():
            raise EngineDeadError(f"the engine has stopped ({self.death}); restart the server.")
        assert self._loop is not None, "start() comes first"
        ticket = next(self._tickets)
        self._pending[ticket] = answer = self._loop.create_future()
        try:
            self._send(message(ticket))
            return await answer
        finally:
            self._pending.pop(ticket, None)

    def _send(self, message: Add | Call | Abort | Stop) -> None:
        """Send as much as the socket accepts now, and the rest when it is writable."""
        assert self._loop is not None, "start() comes first"
        if self.lost.is_set():
            return
        try:
            self._channel.send(message)
        except ChannelClosedError:
            return  # _on_readable sees it, too, after the messages before it
        if self._channel.pending:
            self._loop.add_writer(self._channel.fileno(), self._on_writable)

    def _on_writable(self) -> None:
        assert self._loop is not None, "start() comes first"
        try:
            self._channel.flush()
        except ChannelClosedError:
            self._loop.remove_writer(self._channel.fileno())
            return
        if not self._channel.pending:
            self._loop.remove_writer(self._channel.fileno())

    def _on_bell(self, bell: int) -> None:
        os.read(bell, 8)
        if self._channel.readable:
            ring(bell)  # there may be more; other callbacks run first
            self._on_readable()

    def _on_end(self) -> None:
        """The process has ended. Read its last messages, then the end of the socket."""
        assert self._loop is not None, "start() comes first"
        self._loop.remove_reader(self._wakers.life)
        self._loop.add_reader(self._channel.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            messages = self._channel.receive()
        except ChannelClosedError:
            self._lose()
            return
        for message in messages:
            self._queued = message.num_waiting
            if isinstance(message, EngineUpdate):
                self.death = self.death or message.death
                self._deliver(message.news)
            else:
                self._take(message)

    def _take(self, answer: CallReply) -> None:
        pending = self._pending.get(answer.ticket)
        if pending is None or pending.done():
            return
        if answer.error is not None:
            pending.set_exception(answer.error)
        else:
            pending.set_result(answer.value)

    def _lose(self) -> None:
        """Release the process, which has ended or is about to, and end all requests."""
        if self.lost.is_set():
            return
        assert self._loop is not None, "start() comes first"
        for remove in (self._loop.remove_reader, self._loop.remove_writer):
            remove(self._channel.fileno())
        for fd in self._wakers.open_here:
            self._loop.remove_reader(fd)
        self._wakers.close()
        self._channel.close()
        try:
            code: int | None = self._process.wait(1.0)  # a closed socket comes a moment before the end
        except subprocess.TimeoutExpired:
            code = None
        reason = f"its process ended {_how(code)}"
        if not self._stopping:
            logger.critical("the engine has stopped: %s", reason)
        self.lost.set()
        self._queued = 0
        self._end_all(reason)
        error = EngineDeadError(f"the engine has stopped ({self.death}); restart the server.")
        for pending in self._pending.values():
            if not pending.done():
                pending.set_exception(error)


def _await_ready(channel: Channel) -> Ready:
    while True:
        select.select((channel,), (channel,) if channel.pending else (), ())
        channel.flush()
        if messages := channel.receive():
            ready: Ready = messages[0]
            return ready


def _how(code: int | None) -> str:
    if code is None:
        return "without an exit code"
    return f"by signal {-code}" if code < 0 else f"with exit code {code}"
