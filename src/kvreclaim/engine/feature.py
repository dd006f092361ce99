"""Features of requests. This file is the whole interface between a feature and the engine.

A feature is a folder under `engine/features/` and one line in `engine/features/__init__.py`. The folder has

- a frozen dataclass, the *option*: the arguments of one request. Requests carry options by their type in
  `RequestSpec.options`. A request without the option does not have the feature.
- a class derived from `RequestFeature`. Each engine makes one object of it. Its methods are called for the
  requests that have the feature, and for no others.

A request meets the feature in this order:

1. A prompt in Python (`{"prompt": text, "drop_spans": ...}`) or an HTTP body names fields of the option.
   `option_of` makes the option from them.
2. A server calls `prepare`, off the engine's thread. `Engine.add` calls `conditions` for the compatibility
   table, then `claim`: the feature checks its option, raises an InvalidArgumentError that names the remedy,
   or changes the request's footprint. `limited` follows when the lengths have been checked.
3. `begin`: the request has its first sequence, which is not queued yet.
4. While it runs: `reader` and `rule` for each of its outputs, `before_pass` in each step that computes it.
5. `report`: the feature writes its figures into the request's metrics.

A feature that takes part in every step, whichever request it is for, adds an `Extension`
(`engine/extension.py`) to `engine.extensions` when the first request claims it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from kvreclaim.compression.compressor import Compressor
from kvreclaim.engine.request.hooks import TokenReader
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.request.request import Request, Sequence
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.engine.sampling.rule import OutputRule
from kvreclaim.refusals import Feature
from kvreclaim.schedule.budget.footprint import Footprint


@dataclass(slots=True, eq=False)
class RequestDraft:
    """A request that is being checked. Until it is accepted nothing else changes.

    compressor: compresses the request; None: every token stays, or a compressed cache only drafts
    footprint:  the KV memory that the request may hold; features replace it
    state:      becomes `Request.state`: what features keep with the request, by type
    bad_words:  token ids of each of the parameters' bad_words
    queued:     whether the request is queued at once; else the feature queues it later
    """

    spec: RequestSpec
    compressor: Compressor | None
    footprint: Footprint
    bad_words: tuple[tuple[int, ...], ...] = ()
    state: dict[type, Any] = field(default_factory=dict)
    queued: bool = True


class RequestFeature:
    """A feature that requests may have; made with the Engine. Methods that are not overridden do nothing.

    A feature is made before the engine has storage; it reads the engine's memory and lifecycle later. A
    setting of the engine that it refuses ends the start.

    `option_of`, `prepare`, `conditions`, `claim` and `limited` may raise an InvalidArgumentError, which
    refuses the request. An exception of before_pass ends the request with reason "error". Other methods must
    not raise.

    option:      type of the option, a frozen dataclass
    is_made:     front ends make the option; callers cannot give its fields
    parameter:   field of SamplingParams that gives a request the feature, too
    setting:     field of CompressionConfig that does so
    is_default:  whether requests without the option have the feature, too; set by __init__ from the config
    prompt_keys: fields of the option that a prompt in Python may have, with their types; `object`: the type
                 is checked in `claim`
    usage:       figures of the HTTP answer's usage.kv_cache, summed over the prompts of a body
    counters:    Prometheus counters with their descriptions; the feature adds to `totals.counts` by name
    measured:    fields that change what compression loses, with the values that max_loss has been measured
                 under; a request with max_loss and another value is refused
    """

    option: ClassVar[type[Any]]
    is_made: ClassVar[bool] = False
    parameter: ClassVar[str | None] = None
    setting: ClassVar[str | None] = None
    is_default: bool = False
    prompt_keys: ClassVar[Mapping[str, type]] = {}
    usage: ClassVar[Mapping[str, Callable[[RequestMetrics], int]]] = {}
    counters: ClassVar[Mapping[str, str]] = {}
    measured: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @classmethod
    def http_fields(cls) -> dict[str, tuple[Any, Any]]:
        """Fields of the option that every generating HTTP body has: name to (type, pydantic.Field)."""
        return {}

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names under which callers give the option's fields."""
        return () if cls.is_made else tuple(each.name for each in fields(cls.option))

    @classmethod
    def option_of(cls, given: Mapping[str, Any]) -> Any:
        """Return the option with the given fields; None if all are absent. Raises: InvalidArgumentError."""
        present = {name: value for name, value in given.items() if value is not None}
        return cls.option(**present) if present else None

    def prepare(self, spec: RequestSpec) -> None:
        """Do slow work for a request before it is added, from any thread, so that no step waits for it."""

    def conditions(self, spec: RequestSpec) -> Mapping[Feature, object]:
        """Return rows of the compatibility table that apply to the request, with the values in messages."""
        return {}

    def claim(self, draft: RequestDraft) -> None:
        """Check the option, and change the draft. Lengths are checked afterwards."""

    def limited(self, draft: RequestDraft, max_len: int) -> None:
        """Lengths have been checked. max_len: tokens at which every output ends, prompt included"""

    def begin(self, seq: Sequence) -> None:
        """The request has been accepted; seq is its first sequence. It is not queued yet, and may be changed:
        its footprint, the longest prefix hit."""

    def reader(self, request: Request) -> TokenReader | None:
        """Follow a new output of the request; at most one of its features does."""
        return None

    def rule(self, request: Request) -> OutputRule | None:
        """Restrict the tokens of a new output of the request; at most one of its features does."""
        return None

    def before_pass(self, seq: Sequence) -> None:
        """Tokens of the sequence have been computed. It is compressed afterwards, if that is due. This is
        called twice in a step in which others fork from the sequence."""

    def overrides(self, name: str) -> bool:
        """Return whether it has a method of its own with this name."""
        return getattr(type(self), name) is not getattr(RequestFeature, name)

    def report(self, request: Request, metrics: RequestMetrics) -> None:
        """Write the feature's figures."""


def take_options(features: Iterable[type[RequestFeature]], given: dict[str, Any]) -> dict[type, Any]:
    """Take all fields of options out of `given`. Returns: the options. Raises: InvalidArgumentError."""
    found: dict[type, Any] = {}
    for feature in features:
        own = {name: given.pop(name) for name in feature.field_names() if name in given}
        if (option := feature.option_of(own)) is not None:
            found[feature.option] = option
    return found
