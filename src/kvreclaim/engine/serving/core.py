"""The engine's side of serving: requests in, updates out, between two steps. It runs in any thread or
process; updates can be pickled."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, Literal, Protocol, TypeVar, cast

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import FinishReason, RequestMetrics
from kvreclaim.engine.request.request import Request
from kvreclaim.engine.request.request import Sequence as Output
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.sampling.logprobs import Logprob
from kvreclaim.engine.step.engine import Engine, StepResult
from kvreclaim.errors import InvalidArgumentError

R = TypeVar("R", dict[int, Logprob], dict[int, Logprob] | None)

NONE = -1
"""The size of a report that is None."""


class Reports(Generic[R]):
    """Reports of consecutive tokens in four arrays.

    Each iteration makes new objects, at about 1 us per log-probability. Do not iterate in the engine's loop.
    """

    __slots__ = ("_ids", "_logprobs", "_ranks", "_sizes")

    def __init__(self, reports: Sequence[R]) -> None:
        given = [report for report in reports if report is not None]
        found = [logprob for report in given for logprob in report.values()]
        self._sizes = array("q", [NONE if report is None else len(report) for report in reports])
        self._ids = array("q", [token_id for report in given for token_id in report])
        self._logprobs = array("d", [each.logprob for each in found])
        self._ranks = array("q", [each.rank for each in found])

    def extend(self, later: Reports[R]) -> None:
        """Append the reports of the tokens that follow."""
        for name in self.__slots__:
            getattr(self, name).extend(getattr(later, name))

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[R]:
        entries = zip(self._ids, map(Logprob, self._logprobs, self._ranks), strict=True)
        for size in self._sizes:
            yield cast(R, None if size == NONE else dict(islice(entries, size)))

    def __getstate__(self) -> list[bytes]:
        return [getattr(self, name).tobytes() for name in self.__slots__]

    def __setstate__(self, state: list[bytes]) -> None:
        for name, held in zip(self.__slots__, state, strict=True):
            numbers: array[Any] = array("d" if name == "_logprobs" else "q")
            numbers.frombytes(held)
            setattr(self, name, numbers)


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
