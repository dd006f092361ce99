"""The engine's process: one thread that runs steps, and handles messages between them. started.PROGRAM runs
it with the file descriptors of its socket and, if there is one, its bell."""

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
"""Updates of at least MANY streams are sent at most once per GATHER_S while steps go on. Writing them for
clients costs as much for one token per stream as for two, on a core that the engine may share."""


class EngineCoreProc:
    """Runs steps as long as there is work, and waits for messages otherwise."""

    def __init__(self, channel: Channel, host: EngineCore) -> None:
        self._channel = channel
        self._host = host
        self._made: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._sent_death = False
        self._last_sent_s = 0.0
        self._early: dict[str, bool] = {}  # request with a compressor in the making -> has been aborted
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)

    def run(self) -> None:
        """Run until a Stop message arrives or the channel closes."""
        try:
            while self._turn():
                pass
        except ChannelClosedError:
            logger.warning("the server has gone; the engine's process ends")
        finally:
            self._host.close()

    def _turn(self) -> bool:
        """Handle messages, then run a step. Returns: whether to go on."""
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
        """Do the work. An error that is neither a refusal nor a failed step, such as a panic, is fatal."""
        try:
            work()
        except ChannelClosedError:
            raise
        except BaseException as error:
            self._host.die(error)

    def _wait(self) -> int:
        """Wait for work or messages. Returns: the events of the channel."""
        events = select.POLLIN | (select.POLLOUT if self._channel.pending else 0)
        self._poller.register(self._channel, events)
        found = dict(self._poller.poll(0 if self._host.has_work else None))
        if self._woken.fileno() in found:
            self._woken.recv(1024)
        return found.get(self._channel.fileno(), 0)

    def _pass_on(self) -> None:
        """Send updates. They gather here until the other side has read the previous ones."""
        died = self._host.death is not None and not self._sent_death
        now = time.monotonic()
        if self._host.num_news >= MANY and self._host.has_work and now < self._last_sent_s + GATHER_S:
            return
        if not self._channel.pending and (self._host.num_news or died):
            self._last_sent_s = now
            self._sent_death = self._host.death is not None
            self._channel.send(EngineUpdate(self._host.num_waiting, self._host.take(), self._host.death))

    def _finish(self) -> bool:
        """Send the last updates, however slowly the other side reads them."""
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
        """Queue requests at once if their compressors are known and no feature prepares them. For others
        a thread does this, so that no step waits."""
        llm = self._host.llm
        try:
            message = replace(message, news=[llm.promised(new) for new in message.news])
        except KVReclaimError as error:
            self._queue(message, error)
            return
        preparations = [each for new in message.news for each in llm.engine.factory.preparations(new)]
        configs = [new.compression for new in message.news]
        known = [None if config is None else llm.compressors.kept(config) for config in configs]
        ready = all(k is not None or config is None for k, config in zip(known, configs, strict=True))
        if ready and not preparations:
            self._queue(message, known)
            return

        self._early |= {new.request_id: False for new in message.news}

        def make() -> None:
            try:
                for prepare in preparations:
                    prepare()
                made = [None if config is None else llm.compressor(config) for config in configs]
            except Exception as error:
                refusal = error
                self._made.put(lambda: self._queue(message, refusal))
            else:
                self._made.put(lambda: self._queue(message, made))
            with contextlib.suppress(BlockingIOError):  # full: the loop wakes anyway
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
        """Do the work and send its result or error, also if the error is fatal."""
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
    """Return the error, or a picklable one instead."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__} in the engine's process; its log has more")
    return error


def main() -> None:
    """Run the process. The first message is the engine's EngineSpec; Ready is the first answer. Garbage
    collection starts after that, because imports and loading create no garbage."""
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to both processes; the server drains requests first
        signal.signal(number, signal.SIG_IGN)
    fd, *bells = map(int, sys.argv[1:])
    channel = Channel(socket.socket(fileno=fd), *bells)
    try:
        spec = _first(channel)
        if spec.calibrate is not None:
            gc.enable()  # calibration creates garbage
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
    """Exit at once. A normal interpreter shutdown would wait for the threads of libraries."""
    logging.shutdown()
    os._exit(0)
