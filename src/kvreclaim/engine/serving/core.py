"""The engine's side of serving: requests in, updates out, between two steps. It runs in any thread or
process."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.request import Sequence as Output
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.reports import Reports
from kvreclaim.engine.serving.stream import OutputDelta, Update
from kvreclaim.engine.step.engine import Engine, StepResult

logger = logging.getLogger(__name__)

EngineOutputs = list[tuple[str, Update]]
"""Updates by the ids of their requests, each request once."""


class EngineObserver(Protocol):
    """Called on events, where the engine runs. Calls must be quick and may read the engine."""

    def added(self, engine: Engine, request: Request) -> None: ...

    def stepped(self, engine: Engine, result: StepResult) -> None: ...

    def ended(self, engine: Engine, request: Request) -> None: ...


class EngineCore:
    """An engine and its requests, with readers in another thread or process.

    death: reason why the engine has failed; None while it runs
    """

    def __init__(self, llm: LLM, observers: Sequence[EngineObserver] = ()) -> None:
        self.llm = llm
        self.engine = llm.engine
        self.observers = tuple(observers)
        self.death: str | None = None
        self._cursors: dict[str, Cursor] = {}
        self._news: dict[str, Update] = {}

    @property
    def has_work(self) -> bool:
        return self.death is None and self.engine.has_unfinished

    @property
    def num_waiting(self) -> int:
        """Requests that hold no blocks yet."""
        return len(self.engine.scheduler.waiting)

    def add_all(self, news: Sequence[RequestSpec], compressors: Sequence[Compressor | None]) -> None:
        """Queue requests, all or none. Raises what Engine.add raises."""
        requests: list[Request] = []
        try:
            for new, compressor in zip(news, compressors, strict=True):
                request = self.engine.add(new, compressor)
                requests.append(request)
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        for request in requests:
            self._cursors[request.request_id] = Cursor(request)
            self._tell("added", request)

    def abort(self, request_id: str) -> None:
        """End a request; one that is not known has ended by itself."""
        cursor = self._cursors.get(request_id)
        if cursor is not None and not cursor.request.finished:
            self.engine.abort(request_id)
            self._note([cursor.request])

    def check(self) -> None:
        """Check the block pool. Raises: AssertionError if blocks and block tables differ."""
        self.engine.memory.check()

    def abort_all(self) -> None:
        for request_id in list(self._cursors):
            self.abort(request_id)

    def close(self) -> None:
        """Close the engine, after pending writes to disk. The engine must not be used afterwards."""
        try:
            self.engine.close()
        except Exception:
            logger.exception("closing the engine failed")

    def step(self) -> None:
        """One step of the engine. If it fails, the requests in flight end; the engine goes on if it can."""
        try:
            result = self.engine.step()
        except Exception as error:
            self._survive(error)
            return
        self._tell("stepped", result)  # first, so that delivered answers are counted
        self._note(result.requests)

    def die(self, error: BaseException) -> None:
        """End every request after a fatal error. No further requests are accepted."""
        logger.critical("the engine cannot go on", exc_info=error)
        self.death = type(error).__name__  # its message may quote a prompt; the log has it
        for request_id, cursor in self._cursors.items():
            request = cursor.request
            request.error = request.error or f"{self.death}: {error}"
            self._add(request_id, Update({}, finished=True, error=request.error))
            self._tell("ended", request)
        self._cursors.clear()

    def take(self) -> EngineOutputs:
        """Take the updates since the last call."""
        news, self._news = self._news, {}
        return list(news.items())

    @property
    def num_news(self) -> int:
        """Number of requests with updates."""
        return len(self._news)

    def _survive(self, error: Exception) -> None:
        """End the requests in flight after a failed step, and go on if the engine can."""
        ours = {request_id: cursor.request for request_id, cursor in self._cursors.items()}
        requests = {**self.engine.requests, **ours}  # ours alone: what ended in this very step
        logger.exception("an engine step failed; ending requests %s", list(requests))
        for request in requests.values():
            if not request.finished:
                request.error = f"{type(error).__name__}: {error}"
                self.engine.abort(request.request_id)
        self._note(list(requests.values()))

    def _note(self, requests: list[Request]) -> None:
        """Store the updates of these requests for `take`."""
        ended = []
        for request in requests:
            cursor = self._cursors.get(request.request_id)
            if cursor is None or (request.lacks_prompt_logprobs and not request.finished):
                continue  # a partial prompt gives no update
            update = cursor.advance()
            if update.finished:
                del self._cursors[request.request_id]
                ended.append(request)
            self._add(request.request_id, update)
        for request in ended:
            self._tell("ended", request)

    def _add(self, request_id: str, update: Update) -> None:
        known = self._news.get(request_id)
        if known is None:
            self._news[request_id] = update
        else:
            known.extend(update)

    def _tell(self, event: Literal["added", "stepped", "ended"], fact: Request | StepResult) -> None:
        for observer in self.observers:
            try:
                getattr(observer, event)(self.engine, fact)
            except Exception:
                logger.exception("%s failed", type(observer).__name__)


@dataclass(slots=True)
class Cursor:
    """Progress in passing on the outputs of a request."""

    request: Request
    begun: bool = False
    places: list[OutputProgress] = field(default_factory=list)

    def advance(self) -> Update:
        """Return the update since the last call."""
        request, finished = self.request, self.request.finished
        if len(self.places) < len(shown := request.shown):
            num_prompt = len(request.prompt_token_ids)
            self.places += [OutputProgress(seq, num_prompt) for seq in shown[len(self.places) :]]
        deltas = {place.seq.index: place.advance() for place in self.places if not place.ended}
        if self.begun and not finished:
            return Update(deltas, error=request.error, refusal=request.refusal)
        prompt_logprobs = request.prompt_logprobs if not self.begun else None
        self.begun = True
        reports = None if prompt_logprobs is None else Reports(prompt_logprobs)
        metrics = request.collect_metrics()
        return Update(deltas, metrics, finished, request.error, request.refusal, reports)


@dataclass(slots=True)
class OutputProgress:
    """Progress in passing on one output: numbers of its tokens, characters and reports."""

    seq: Output
    num_tokens: int
    num_chars: int = 0
    num_reports: int = 0
    ended: bool = False

    def advance(self) -> OutputDelta:
        """Take the new part of an output. The delta with a finish_reason is its last."""
        seq = self.seq
        text = seq.detokenizer.text if seq.detokenizer is not None else ""
        delta = OutputDelta(seq.index, text[self.num_chars :], seq.token_ids[self.num_tokens :])
        self.num_chars, self.num_tokens = len(text), len(seq.token_ids)
        if len(seq.logprobs) > self.num_reports:
            delta.logprobs = Reports(seq.logprobs[self.num_reports :])
            self.num_reports = len(seq.logprobs)
        if seq.finish_reason is not None:
            delta.finish_reason, delta.stop_reason = seq.finish_reason, seq.stop_reason
            self.ended = True
        if seq.hypothesis is not None:
            delta.scores = seq.hypothesis.cumulative, seq.hypothesis.score
        return delta
