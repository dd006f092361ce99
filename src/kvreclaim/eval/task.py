"""The interface of a task: examples as token ids, and verdicts on the model's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

SEED_STRIDE = 1_000_000
"""Seed s draws the examples s * SEED_STRIDE, s * SEED_STRIDE + 1, ... of a task."""


class Metric(StrEnum):
    """The meaning of a row's value."""

    ACCURACY = "accuracy"
    """Share of correct verdicts."""
    PERPLEXITY = "perplexity"
    """exp of the mean negative log-likelihood of a given token; lower is better."""
    AGREEMENT = "top1_agreement"
    """Share of positions with the full cache's most likely token."""


@dataclass(frozen=True, slots=True)
class Item:
    """One example for the engine.

    prompt:         token ids
    continuation:   token ids that are scored (teacher forcing); empty if the answer is generated
    max_new_tokens: most tokens of a generated answer
    temperature, seed: of its sampling
    chunks:         reusable parts of the prompt, as (first token, end)
    compress_at:    leading tokens of the prompt that are compressed before the rest is known; None: none
    num_system:     leading tokens that are system prompt and tools, which a chat's compression protects
    turns:          of a session, in order, each scored after the one before; the item equals the last
    payload:        data for the task's verdict
    """

    prompt: tuple[int, ...]
    continuation: tuple[int, ...] = ()
    max_new_tokens: int = 0
    temperature: float = 0.0
    seed: int | None = None
    chunks: tuple[tuple[int, int], ...] = ()
    compress_at: int | None = None
    num_system: int = 0
    turns: tuple[Item, ...] = ()
    payload: Any = None

    @property
    def num_tokens(self) -> int:
        """The sequence's final length in tokens, of which the budget is a share."""
        return len(self.prompt) + (len(self.continuation) or self.max_new_tokens)


@dataclass(frozen=True, slots=True)
class Answer:
    """The model's answer to one item.

    predicted, logprobs: per continuation token, the most likely token and the given one's log-probability
    text, token_ids:     of a generated answer
    length:              its number of tokens, if a server counted them
    compared:            sums against the full cache, for a task that compares (agreement.Divergence)
    turns:               of a session: `compared` of each turn, and tokens of its prompt: "prompt", "cached"
    texts:               of a conversation: the answers by turn
    full:                of a conversation: the full cache's answer, for a task that compares
    """

    predicted: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()
    length: int | None = None
    compared: Mapping[str, float] = field(default_factory=dict)
    turns: tuple[Mapping[str, float], ...] = ()
    texts: tuple[tuple[str, ...], ...] = ()
    full: Answer | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of a generated answer."""
        return len(self.token_ids) if self.length is None else self.length


@dataclass(frozen=True, slots=True)
class TaskScore:
    """The verdict on one example; a row's value comes from sum(points) / sum(out_of).

    found, lost: positions of the evidence of correct and wrong answers, as shares of the sequence in [0, 1]
    extra:       further figures, averaged over the examples of a row
    cached_by_turn, agreement_by_turn: of each turn of a session: the share of its prompt in the prefix
                 cache, and the share of its answer that matches the full cache's
    """

    points: float
    out_of: float
    found: tuple[float, ...] = ()
    lost: tuple[float, ...] = ()
    extra: Mapping[str, float] = field(default_factory=dict)
    cached_by_turn: tuple[float, ...] = ()
    agreement_by_turn: tuple[float, ...] = ()


@runtime_checkable
class Task(Protocol):
    """A family of examples. Pure: item depends only on its arguments and on identity.

    name:     as in the report
    metric:   of its rows
    identity: everything that determines its items and verdicts, as JSON values; part of the journal's key
    seeded:   False if the seed changes nothing (a given file): only the first seed is run
    compares: True if the verdict needs the full cache's distributions (Answer.compared) or answer (full)
    """

    @property
    def name(self) -> str: ...

    @property
    def metric(self) -> Metric: ...

    @property
    def identity(self) -> Mapping[str, Any]: ...

    @property
    def seeded(self) -> bool: ...

    @property
    def compares(self) -> bool: ...

    def num_examples(self, wanted: int) -> int:
        """Number of examples, at most `wanted`."""
        ...

    def item(self, seed: int, index: int) -> Item:
        """Example number index of a seed."""
        ...

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        """Judge the answer."""
        ...


class PlainTask:
    """Defaults of most tasks: shares of verdicts, and any number of examples."""

    metric = Metric.ACCURACY
    seeded = True
    compares = False

    def num_examples(self, wanted: int) -> int:
        return wanted


@runtime_checkable
class FreeTask(Protocol):
    """A scored task whose continuation can also be generated freely."""

    def judge_free(self, item: Item, answer: Answer) -> Mapping[str, float]:
        """Return further figures of a generated answer (TaskScore.extra)."""
        ...


class Conversation(Protocol):
    """A conversation: each request depends on the answers before it."""

    @property
    def answer(self) -> Answer:
        """All answers of the conversation."""
        ...

    def request(self) -> Item | None:
        """Return the next request; None at the end."""
        ...

    def take(self, text: str, num_prompt: int, num_cached: int) -> None:
        """Record the answer to the last request, and its prompt and cached tokens."""
        ...


@runtime_checkable
class ConversationTask(Protocol):
    """A task whose items are conversations. Their requests are at most item.num_tokens long."""

    def converse(self, item: Item) -> Conversation:
        """Start the conversation of an item."""
        ...


@runtime_checkable
class SampledTask(Protocol):
    """A task with several sampled answers per problem: examples i x samples to (i + 1) x samples - 1 belong
    to problem i."""

    @property
    def samples(self) -> int: ...


@runtime_checkable
class SuiteTask(Protocol):
    """One of several tasks with a reported mean. suite: its name"""

    @property
    def suite(self) -> str: ...
