"""Outputs of a request for an asyncio caller, as they grow. All values can be pickled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace

from kvreclaim.engine.request.outputs import FinishReason, RequestMetrics
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.sampling.logprobs import Logprob
from kvreclaim.engine.serving.reports import Reports
from kvreclaim.errors import InvalidArgumentError

PromptReports = Reports[dict[int, Logprob] | None]
"""One report per prompt token. The first is None, because no logits predict it."""


@dataclass(slots=True)
class OutputDelta:
    """The new part of one output since the last update.

    text may be empty although there are tokens: the beginning of a stop string or character is held back
    logprobs: of the tokens, None where there are none
    scores:   of what a beam search has found: cumulative_logprob and sequences_scores
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: Reports[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    scores: tuple[float, float] | None = None

    def extend(self, later: OutputDelta) -> None:
        """Append a later delta."""
        self.text += later.text
        self.token_ids += later.token_ids
        if self.logprobs is not None and later.logprobs is not None:
            self.logprobs.extend(later.logprobs)
        else:
            self.logprobs = self.logprobs or later.logprobs
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.scores = later.scores


@dataclass(slots=True)
class Update:
    """The new part of a request since the last update.

    metrics:         of the request so far, in its first update and its last
    finished:        nothing follows; error: why the request failed, None otherwise
    refusal:         the error if it was caused by the request's own options
    prompt_logprobs: of every token of the prompt, in the first update, if requested
    """

    deltas: dict[int, OutputDelta]
    metrics: RequestMetrics | None = None
    finished: bool = False
    error: str | None = None
    refusal: InvalidArgumentError | None = None
    prompt_logprobs: PromptReports | None = None

    def extend(self, later: Update) -> None:
        """Append a later update."""
        for index, delta in later.deltas.items():
            if index in self.deltas:
                self.deltas[index].extend(delta)
            else:
                self.deltas[index] = delta
        self.metrics = later.metrics or self.metrics
        self.prompt_logprobs = later.prompt_logprobs or self.prompt_logprobs
        self.finished, self.error, self.refusal = later.finished, later.error, later.refusal


class RequestStream:
    """A request's updates, for one reader in the event loop.

    A slow reader gets several steps in one update. It delays no other request, and needs no more memory than
    its outputs.

    new:             the request
    ended:           whether the last update has arrived
    prompt_logprobs: set from the first update on, if requested
    finish_reasons:  of the outputs that have ended, by index
    """

    def __init__(self, new: RequestSpec) -> None:
        self.new = new
        self.ended = False
        self.prompt_logprobs: PromptReports | None = None
        self.finish_reasons: dict[int, FinishReason] = {}
        self._metrics = RequestMetrics(num_prompt_tokens=len(new.prompt_token_ids))
        self._num_generated = 0
        self._texts: dict[int, list[str]] = {}
        self._pending: Update | None = None
        self._arrived = asyncio.Event()
        self._finished = asyncio.Event()

    @property
    def request_id(self) -> str:
        return self.new.request_id

    @property
    def metrics(self) -> RequestMetrics:
        """The metrics so far: final once the stream has ended; before that, those of the first update with
        the current number of generated tokens."""
        if self.ended:
            return self._metrics
        return replace(self._metrics, num_generated_tokens=self._num_generated)

    @property
    def texts(self) -> list[str]:
        """The text of every output so far."""
        return ["".join(self._texts.get(index, ())) for index in range(self.new.params.n)]

    def put(self, update: Update) -> None:
        """Add an update. Called in the event loop."""
        self.ended = update.finished
        self._metrics = update.metrics or self._metrics
        self.prompt_logprobs = update.prompt_logprobs or self.prompt_logprobs
        for delta in update.deltas.values():
            self._num_generated += len(delta.token_ids)
            self._texts.setdefault(delta.index, []).append(delta.text)
            if delta.finish_reason is not None:
                self.finish_reasons[delta.index] = delta.finish_reason
        if self._pending is None:
            self._pending = update
        else:
            self._pending.extend(update)
        self._arrived.set()
        if update.finished:
            self._finished.set()

    async def next(self) -> Update:
        """Wait for the next update and return it."""
        await self._arrived.wait()
        self._arrived.clear()
        update, self._pending = self._pending, None
        assert update is not None, f"request {self.request_id} woke its reader without an update"
        return update

    async def rest(self) -> Update:
        """Wait until the request has ended, and return all of its remaining updates as one."""
        await self._finished.wait()
        return await self.next()

    async def __aiter__(self) -> AsyncIterator[Update]:
        """Yield every update; the last one is finished."""
        while True:
            update = await self.next()
            yield update
            if update.finished:
                return
