"""Messages between the two processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvreclaim.checks import require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.registry import policy_classes
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.serving.core import EngineCore, EngineOutputs
from kvreclaim.engine.serving.served import ServedModel
from kvreclaim.engine.serving.stream import OutputDelta, Update


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine that is to run in a process of its own; all of it can be pickled.

    model, dtype, device, compression, calibrate, options: as LLM takes them
    prepare:   called there before anything else, to set up its log
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    compression: CompressionConfig | None = None
    calibrate: Callable[[LLM], object] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        _require_importable(self.compression)

    def load(self) -> LLM:
        """Here. Raises what LLM raises."""
        place: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "compression": self.compression,
            "calibrate": self.calibrate,
        }
        return LLM(self.model, **place, **self.options)


def _require_importable(config: CompressionConfig | None) -> None:
    """Raises: InvalidArgumentError for a policy object of a class that the engine's process cannot import."""
    policy = None if config is None else config.policy_object
    for cls in () if policy is None else policy_classes(policy):
        require(
            cls.__module__ != "__main__" and "<locals>" not in cls.__qualname__,
            f"policy {cls.__name__} is defined in {cls.__module__}, which the engine's process cannot load; "
            "move the class to a module, or use LLM, which runs in this process.",
            "policy",
        )


@dataclass(frozen=True, slots=True)
class Add:
    """Queue requests, all or none; a CallReply follows."""

    ticket: int
    news: Sequence[RequestSpec]

    def __post_init__(self) -> None:
        for each in self.news:
            _require_importable(each.compression)


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Run a module's function between two steps; a CallReply follows."""

    ticket: int
    function: Callable[[EngineCore], Any]
    allow_dead: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End every request, and the process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves; error: it never will."""

    served: ServedModel | None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class CallReply:
    """To the message of this ticket. num_waiting: in the engine's queue."""

    ticket: int
    num_waiting: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """Updates of the requests. death: why the engine cannot go on."""

    num_waiting: int
    news: EngineOutputs
    death: str | None

    def __reduce__(self) -> tuple[Callable[..., EngineUpdate], tuple[Any, ...]]:
        """At most steps a request's news are one token and its text: rows cross at a third of objects'
        cost. The order among requests is not kept."""
        rows: list[Row] = []
        others: EngineOutputs = []
        for request_id, update in self.news:
            row = row_of(request_id, update)
            if row is None:
                others.append((request_id, update))
            else:
                rows.append(row)
        return _told, (self.num_waiting, rows, others, self.death)


Row = tuple[str, int, str, list[int]]
"""A request's id; index, text and tokens of its one delta, where that is all that is new."""


def row_of(request_id: str, update: Update) -> Row | None:
    """None if there is more to it."""
    if update.finished or update.metrics or update.error or update.prompt_logprobs or len(update.deltas) != 1:
        return None
    (delta,) = update.deltas.values()
    if delta.logprobs is not None or delta.finish_reason is not None:
        return None
    return request_id, delta.index, delta.text, delta.token_ids


def _told(num_waiting: int, rows: list[Row], others: EngineOutputs, death: str | None) -> EngineUpdate:
    news = [(name, Update({index: OutputDelta(index, text, ids)})) for name, index, text, ids in rows]
    return EngineUpdate(num_waiting, news + others, death)
