"""What an asyncio caller sees of a request: its outputs as they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from kvreclaim.engine.core.outputs import FinishReason, Logprob, RequestMetrics
from kvreclaim.engine.core.request import Request, Sequence


@dataclass(slots=True)
class OutputDelta:
    """What one output gained since the last update.

    text may be empty although tokens came: the beginning of a stop string or of a character is held back
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

    def extend(self, later: OutputDelta) -> None:
        """Take in what came after."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason


@dataclass(slots=True)
class Update:
    """What a request gained since its reader last looked.

    metrics:  of the request so far, in its first update and its last
    finished: nothing follows; error: why the request failed, None otherwise
    """

    deltas: dict[int, OutputDelta]
    metrics: RequestMetrics | None = None
    finished: bool = False
    error: str | None = None

    def extend(self, later: Update) -> None:
        """Take in what came after."""
        for index, delta in later.deltas.items():
            if index in self.deltas:
                self.deltas[index].extend(delta)
            else:
                self.deltas[index] = delta
        self.metrics = later.metrics or self.metrics
        self.finished, self.error = later.finished, later.error


class RequestStream:
    """A request's updates, for one reader in the event loop.

    A reader that is slow finds several steps in one update; it holds up nobody and needs no more memory
    than its outputs.
    """

    def __init__(self, request: Request) -> None:
        self.request = request
        self.ended = False
        self._pending: Update | None = None
        self._arrived = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    def put(self, update: Update) -> None:
        """Called in the event loop."""
        self.ended = update.finished
        if self._pending is None:
            self._pending = update
        else:
            self._pending.extend(update)
        self._arrived.set()
        if update.finished:
            self._finished.set()

    async def next(self) -> Update:
        """What came since the last call; waits until something has."""
        await self._arrived.wait()
        self._arrived.clear()
        update, self._pending = self._pending, None
        assert update is not None, f"request {self.request_id} woke its reader without an update"
        return update

    async def rest(self) -> Update:
        """Everything that is still to come, once the request has ended."""
        await self._finished.wait()
        return await self.next()

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Every update; the last one is finished."""
        while True:
            update = await self.next()
            yield update
            if update.finished:
                return


@dataclass(slots=True)
class Cursor:
    """How far the outputs of a request have been passed on. Lives in the engine's thread."""

    request: Request
    stream: RequestStream
    begun: bool = False
    places: list[Place] = field(default_factory=list)

    def advance(self) -> Update:
        """Everything that is new since the last call."""
        request = self.request
        num_prompt = len(request.prompt_token_ids)
        self.places += [Place(seq, num_prompt) for seq in request.sequences[len(self.places) :]]
        deltas = {place.seq.index: place.advance() for place in self.places if not place.ended}
        finished = request.finished
        metrics = request.collect_metrics() if finished or not self.begun else None
        self.begun = True
        return Update(deltas, metrics, finished, request.error)


@dataclass(slots=True)
class Place:
    """How far one output has been passed on: so many of its tokens, characters and reports."""

    seq: Sequence
    num_tokens: int
    num_chars: int = 0
    num_reports: int = 0
    ended: bool = False

    def advance(self) -> OutputDelta:
        """What is new; the delta that says why the output ended is its last."""
        seq = self.seq
        text = seq.detokenizer.text if seq.detokenizer is not None else ""
        reports = seq.logprobs[self.num_reports :] if seq.logprobs else []
        delta = OutputDelta(
            seq.index,
            text[self.num_chars :],
            seq.token_ids[self.num_tokens :],
            reports,
            seq.finish_reason,
            seq.stop_reason,
        )
        self.num_chars = len(text)
        self.num_tokens += len(delta.token_ids)
        self.num_reports += len(reports)
        self.ended = seq.finish_reason is not None
        return delta
