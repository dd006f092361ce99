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
from kvreclaim.engine.serving.core import EngineCore, EngineOutputs, OutputDelta, Update
from kvreclaim.engine.serving.served import ServedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Arguments of an engine for a process of its own. All fields can be pickled.

    model, dtype, device, compression, calibrate, options: of LLM
    prepare:   called in the process before anything else, to set up its log
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
        """Load the engine in this process. Raises what LLM raises."""
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
    """Queue requests, all or none. A CallReply follows."""

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
    """The engine has started. error: why it could not start"""

    served: ServedModel | None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class CallReply:
    """Reply to the message with this ticket. num_waiting: requests in the engine's queue."""

    ticket: int
    num_waiting: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class EngineUpdate:
    """Updates of the requests. death: reason why the engine has failed."""

    num_waiting: int
    news: EngineOutputs
    death: str | None

    def __reduce__(self) -> tuple[Callable[..., EngineUpdate], tuple[Any, ...]]:
        """Pickle updates of one token and its text, as most steps give, as plain rows, at a third of the
        cost of objects. The order among requests is not kept."""
        rows: list[Row] = []
        others: EngineOutputs = []
        for request_id, update in self.news:
            row = row_of(request_id, update)
            if row is None:
                others.append((request_id, update))
            else:
                rows.append(row)
        return _restore, (self.num_waiting, rows, others, self.death)


Row = tuple[str, int, str, list[int]]
"""A request's id; index, text and tokens of its one delta, for an update with nothing else."""


def row_of(request_id: str, update: Update) -> Row | None:
    """Return the update as a row; None if it has further fields."""
    if update.finished or update.metrics or update.error or update.prompt_logprobs or len(update.deltas) != 1:
        return None
    (delta,) = update.deltas.values()
    if delta.logprobs is not None or delta.finish_reason is not None:
        return None
    return request_id, delta.index, delta.text, delta.token_ids


def _restore(num_waiting: int, rows: list[Row], others: EngineOutputs, death: str | None) -> EngineUpdate:
    news = [(name, Update({index: OutputDelta(index, text, ids)})) for name, index, text, ids in rows]
    return EngineUpdate(num_waiting, news + others, death)
