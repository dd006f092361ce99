"""The engine's process: one thread that steps, and between two steps does what it is told. started.PROGRAM
runs it, with the numbers of its socket and of its bell, if there is one."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.serving.channel import Channel, ChannelClosedError
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
from kvreclaim.errors import EngineDeadError, KVReclaimError

logger = logging.getLogger(__name__)

MANY, GATHER_S = 8, 0.008
"""News of so many streams is told this often at most while steps go on: to write it for clients costs as much
for one token of each as for two, on a core that the engine may share."""


class EngineCoreProc:
    """Steps for as long as there is work, and waits for messages where there is none."""

    def __init__(self, channel: Channel, host: EngineCore) -> None:
        self._channel = channel
        self._host = host
        self._made: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._told_death = False
        self._told_s = 0.0
        self._early: dict[str, bool] = {}  # requests whose compressors are being made: aborted meanwhile?
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)

    def run(self) -> None:
        """Until it is told to stop, or nobody is left to tell."""
        try:
            while self._turn():
                pass
        except ChannelClosedError:
            logger.warning("the server has gone; the engine's process ends")
        finally:
            self._host.close()

    def _turn(self) -> bool:
        """Messages, then a step. Returns: whether to go on."""
        messages = self._channel.receive() if self._wait() & ~select.POLLOUT else []
        for message in messages:
            self._guard(partial(self._handle, message))
        while self._made.qsize():
            self._guard(self._made.get())
        if self._host.has_work:
            self._guard(self._host.step)
        self._channel.flush()
        self._pass_on()
        return Stop() not in messages or self._finish()

    def _guard(self, work: Callable[[], None]) -> None:
        """Do it; what is no refusal and no failed step, as a library's panic, is the engine's end."""
        try:
            work()
        except ChannelClosedError:
            raise
        except BaseException as error:
            self._host.die(error)

    def _wait(self) -> int:
        """Until there is something to do. Returns: the events of the channel."""
        events = select.POLLIN | (select.POLLOUT if self._channel.pending else 0)
        self._poller.register(self._channel, events)
        found = dict(self._poller.poll(0 if self._host.has_work else None))
        if self._woken.fileno() in found:
            self._woken.recv(1024)
        return found.get(self._channel.fileno(), 0)

    def _pass_on(self) -> None:
        """Tell what is new. While the other side has not taken the last of it, it gathers here."""
        died = self._host.death is not None and not self._told_death
        now = time.monotonic()
        if self._host.num_news >= MANY and self._host.has_work and now < self._told_s + GATHER_S:
            return
        if not self._channel.pending and (self._host.num_news or died):
            self._told_s = now
            self._told_death = self._host.death is not None
            self._channel.send(EngineUpdate(self._host.num_waiting, self._host.take(), self._host.death))

    def _finish(self) -> bool:
        """The last words, however slow the other side takes them."""
        self._guard(self._host.abort_all)
        while self._channel.pending or self._host.num_news:
            self._channel.flush()
            self._pass_on()
            if self._channel.pending:
                select.select((), (self._channel,), ())
        return False

    def _handle(self, message: Any) -> None:
        match message:
            case Add():
                self._add(message)
            case Abort(request_id=request_id) if request_id in self._early:
                self._early[request_id] = True
            case Abort(request_id=request_id):
                self._host.abort(request_id)
            case Call(ticket=ticket, function=function, allow_dead=allow_dead):
                self._answer(ticket, lambda: function(self._host), allow_dead=allow_dead)

    def _add(self, message: Add) -> None:
        """Requests whose compressors are known and that need no grammar at once; for others a thread makes
        what they need, so that no step waits."""
        llm = self._host.llm
        try:
            message = replace(message, news=[llm.promised(new) for new in message.news])
        except KVReclaimError as error:
            self._queue(message, error)
            return
        grammars = [new.params.structured_outputs for new in message.news if new.params.structured_outputs]
        configs = [new.compression for new in message.news]
        known = [None if config is None else llm.compressors.kept(config) for config in configs]
        ready = all(k is not None or config is None for k, config in zip(known, configs, strict=True))
        if ready and not grammars:
            self._queue(message, known)
            return

        self._early |= {new.request_id: False for new in message.news}

        def make() -> None:
            try:
                for grammar in grammars:
                    llm.make_grammar(grammar)
                made = [None if config is None else llm.compressor(config) for config in configs]
            except Exception as error:
                refusal = error
                self._made.put(lambda: self._queue(message, refusal))
            else:
                self._made.put(lambda: self._queue(message, made))
            with contextlib.suppress(BlockingIOError):  # it has been woken often enough
                self._waker.send(b"w")

        threading.Thread(target=make, name="kvreclaim-compressors", daemon=True).start()

    def _queue(self, message: Add, compressors: list[Compressor | None] | Exception) -> None:
        def add() -> None:
            if isinstance(compressors, Exception):
                raise compressors
            self._host.add_all(message.news, compressors)

        self._answer(message.ticket, add)
        for new in message.news:
            if self._early.pop(new.request_id, False):
                self._host.abort(new.request_id)

    def _answer(self, ticket: int, work: Callable[[], Any], *, allow_dead: bool = False) -> None:
        """Do it, and say what came of it, also if that is the engine's end."""
        value, error = None, None
        try:
            if self._host.death is not None and not allow_dead:
                raise self._dead()
            value = work()
        except Exception as raised:
            if not isinstance(raised, KVReclaimError):
                logger.exception("a message to the engine's process failed")
            error = _plain(raised)
        except BaseException as raised:
            self._host.die(raised)
            error = self._dead()
        self._channel.send(CallReply(ticket, self._host.num_waiting, value, error))

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(f"the engine has stopped ({self._host.death}); restart the server.")


def _plain(error: Exception) -> Exception:
    """The error as it can be sent."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} in the engine's process; its log has more")
    return error


def main() -> None:
    """The process: the first message is the engine's EngineSpec; Ready is the first answer. Garbage is not
    looked for until then: what imports and loading make stays."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to both of us; the server lets requests end first
        signal.signal(number, signal.SIG_IGN)
    fd, *bells = map(int, sys.argv[1:])
    channel = Channel(socket.socket(fileno=fd), *bells)
    try:
        spec = _first(channel)
        if spec.calibrate is not None:
            gc.enable()  # it makes garbage
        if spec.prepare is not None:
            spec.prepare()
        try:
            host = EngineCore(spec.load())
        except Exception as error:
            if not isinstance(error, KVReclaimError):
                logger.exception("the engine did not start")
            _send_whole(channel, Ready(None, _plain(error)))
            return
        _send_whole(channel, Ready(ServedModel.of(host.llm)))
    except ChannelClosedError:
        return
    gc.freeze()
    gc.enable()
    EngineCoreProc(channel, host).run()


def _first(channel: Channel) -> EngineSpec:
    while True:
        select.select((channel,), (), ())
        if messages := channel.receive():
            spec: EngineSpec = messages[0]
            return spec


def _send_whole(channel: Channel, message: Ready) -> None:
    channel.send(message)
    while channel.pending:
        select.select((), (channel,), ())
        channel.flush()


def end() -> NoReturn:
    """At once: an interpreter that shuts down waits for the threads of libraries."""
    logging.shutdown()
    os._exit(0)
