"""What the two processes say to each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvreclaim.compression import CompressionConfig
from kvreclaim.engine.face.llm import LLM
from kvreclaim.engine.serving.host import Host, News
from kvreclaim.engine.serving.served import Served
from kvreclaim.engine.serving.stream import NewRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine that is to run in a process of its own; all of it can be pickled.

    model, dtype, device, compression, options: as LLM takes them
    prepare:   called there before anything else, to set up its log
    """

    model: str
    dtype: str = "auto"
    device: str = "auto"
    compression: CompressionConfig | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[], None] | None = None

    def load(self) -> LLM:
        """Here. Raises what LLM raises."""
        place: dict[str, Any] = {
            "dtype": self.dtype,
            "device": self.device,
            "compression": self.compression,
        }
        return LLM(self.model, **place, **self.options)


@dataclass(frozen=True, slots=True)
class Add:
    """Queue requests, all or none; an Answer follows."""

    ticket: int
    news: Sequence[NewRequest]


@dataclass(frozen=True, slots=True)
class Abort:
    request_id: str


@dataclass(frozen=True, slots=True)
class Call:
    """Run a module's function between two steps; an Answer follows."""

    ticket: int
    function: Callable[[Host], Any]
    of_the_dead: bool


@dataclass(frozen=True, slots=True)
class Stop:
    """End every request, and the process."""


@dataclass(frozen=True, slots=True)
class Ready:
    """The engine serves; error: it never will."""

    served: Served | None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """To the message of this ticket. num_waiting: in the engine's queue."""

    ticket: int
    num_waiting: int
    value: Any = None
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What is new of the requests. death: why the engine cannot go on."""

    num_waiting: int
    news: News
    death: str | None
