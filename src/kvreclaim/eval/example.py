"""One document of a demo task: its construction, and the scoring of predictions.

A document is a prompt (filler with facts scattered in it, then a header with every random choice) and its
trace, the one correct continuation. For each token of the trace the example has the kind of evidence that
predicts it and the position of that evidence.
"""

import enum
import random
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval import vocabulary as v

NOISE_RUN = (4, 24)  # nodes or words in a row where filler is mixed
NOWHERE = -1


class TokenKind(enum.Enum):
    """The evidence that predicts a token of the trace."""

    MARK = "mark"  # the next step: `#`, `<`, …, `<eos>`
    KEY = "key"  # the node where the last step ended, copied
    ASKED = "asked"  # the next query: only the header's list has it
    LOOKUP = "lookup"  # the fact about the previous token: only the prompt has it
    CARRY = "carry"  # the carry of a forward hop: the last carry and the node before it
    RETURN = "return"  # the predecessor or parent of a node: prompt or earlier trace
    RESTORE = "restore"  # a carry that only the far-back trace has
    FIRST = "first"  # a step's first filler word: continues after the last step's last one
    FILLER = "filler"  # follows from the word before it
    STOP = "stop"  # `.`: counts filler words


@dataclass(frozen=True)
class Example:
    """One prompt with the only correct continuation.

    kinds:    aligned with `trace`
    evidence: aligned with `trace`: position in the document from which the trace's token must be read; -1 if
              it follows from its neighbours or is computed
    """

    prompt: tuple[int, ...]
    trace: tuple[int, ...]
    kinds: tuple[TokenKind, ...]
    evidence: tuple[int, ...]

    @property
    def document(self) -> tuple[int, ...]:
        """Prompt and trace as one token list."""
        return self.prompt + self.trace


class EvidencePart(enum.Enum):
    """Part of the sequence that holds a token of evidence."""

    FACT = "fact"
    HEADER = "header"
    TRACE = "trace"


@dataclass(frozen=True)
class EvidencePlace:
    """A token of evidence: of fact `index` the token `offset`, or token `index` of header or trace."""

    part: EvidencePart
    index: int
    offset: int = 0


def in_fact(index: int, offset: int) -> EvidencePlace:
    """Token `offset` (0 is `@`) of fact `index`."""
    return EvidencePlace(EvidencePart.FACT, index, offset)


def in_header(index: int) -> EvidencePlace:
    """Token `index` of the header."""
    return EvidencePlace(EvidencePart.HEADER, index)


@dataclass(frozen=True, kw_only=True)
class SizedTask(ABC):
    """Draws examples of one size; the same task and seed always give the same example.

    filler_words: (least, most) filler words per step, drawn per example and given by the header
    noise:        share of the prompt's filler that is runs of random nodes
    """

    filler_words: tuple[int, int] = (6, 10)
    noise: float = 0.0
    seeds: ClassVar[str]
    """Prefix of the seeds of its random numbers."""

    def __post_init__(self) -> None:
        """Refuse sizes that the vocabulary or the document can't hold."""
        least, most = self.filler_words
        require(
            1 <= least <= most < v.NUM_LENGTHS,
            f"filler_words is {self.filler_words}; it must be (least, most) within 1..{v.NUM_LENGTHS - 1}",
        )
        require(
            0 <= self.noise <= 1,
            f"noise is {self.noise}; it is a share of the filler and must be within 0..1",
        )

    def sample(self, seed: int) -> Example:
        """Return the example of this seed."""
        rng = random.Random(f"{self.seeds}evaluation:{seed}")
        return self.draw(rng, rng.randint(*self.filler_words))

    def assemble(
        self,
        rng: random.Random,
        writer: "TraceWriter",
        facts: Sequence[Sequence[int]],
        header: Sequence[int],
        num_tokens: int,
    ) -> Example:
        """Build the example of num_tokens tokens from this trace, which lacks only `<eos>`."""
        num_body = num_tokens - len(writer.tokens) - 1 - len(header)
        return writer.finish(scatter(rng, facts, num_body, writer.follower, self.noise), header)

    @abstractmethod
    def draw(self, rng: random.Random, num_filler: int) -> Example:
        """An example whose steps have `num_filler` filler words."""


def check_room(num_tokens: int, needed: int) -> None:
    """Raises: InvalidArgumentError for a document that is too short for its content."""
    require(num_tokens >= needed, f"num_tokens is {num_tokens}; these dials need {needed} or more")


@dataclass
class TraceWriter:
    """Collects a trace with kinds and evidence; each step ends in filler words and a stop.

    word: the last filler word written, at first the header's
    """

    word: int
    num_filler: int
    follower: dict[int, int]
    tokens: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    places: list[EvidencePlace | None] = field(default_factory=list)

    def add(self, token: int, kind: TokenKind, place: EvidencePlace | None = None) -> EvidencePlace:
        self.tokens.append(token)
        self.kinds.append(kind)
        self.places.append(place)
        return EvidencePlace(EvidencePart.TRACE, len(self.tokens) - 1)

    def close_step(self) -> None:
        """Write the step's filler words and its stop."""
        words = v.filler_run(self.word, self.num_filler, self.follower)
        for i, word in enumerate(words):
            self.add(word, TokenKind.FILLER if i else TokenKind.FIRST)
        self.word = words[-1]
        self.add(v.STOP, TokenKind.STOP)

    def finish(self, body: "Body", header: Sequence[int]) -> Example:
        """Write `<eos>`; return the example that this trace makes with its prompt."""
        self.add(v.EOS, TokenKind.MARK)
        num_body = len(body.tokens)
        starts = {EvidencePart.HEADER: num_body, EvidencePart.TRACE: num_body + len(header)}

        def position(place: EvidencePlace | None) -> int:
            if place is None:
                return NOWHERE
            if place.part is EvidencePart.FACT:
                return body.starts[place.index] + place.offset
            return starts[place.part] + place.index

        evidence = tuple(position(place) for place in self.places)
        return Example((*body.tokens, *header), tuple(self.tokens), tuple(self.kinds), evidence)


@dataclass(frozen=True)
class Body:
    """The prompt before its header; `starts[i]` is the position of the `@` of fact i."""

    tokens: tuple[int, ...]
    starts: tuple[int, ...]


def scatter(
    rng: random.Random,
    facts: Sequence[Sequence[int]],
    num_tokens: int,
    follower: dict[int, int],
    noise: float = 0.0,
) -> Body:
    """Spread the facts, each `@` and its tokens, in random order over `num_tokens` tokens of filler.

    noise: share of the filler that is runs of random nodes, so that facts are not the only nodes; the rest
           are runs of words with random starts
    """
    order = rng.sample(range(len(facts)), len(facts))
    num_filler = num_tokens - sum(len(fact) + 1 for fact in facts)
    cuts = [0, *sorted(rng.randint(0, num_filler) for _ in facts), num_filler]
    tokens: list[int] = []
    starts = [0] * len(facts)
    for i, (begin, end) in enumerate(pairwise(cuts)):
        tokens += _filler(rng, end - begin, follower, noise)
        if i < len(facts):
            starts[order[i]] = len(tokens)
            tokens += [v.FACT, *facts[order[i]]]
    return Body(tuple(tokens), tuple(starts))


def _filler(rng: random.Random, num_tokens: int, follower: dict[int, int], noise: float) -> list[int]:
    """Return filler between two facts: one run of words, or alternating words and nodes."""
    if not noise:
        return v.filler_run(v.draw_word(rng), num_tokens, follower)
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        length = min(rng.randint(*NOISE_RUN), num_tokens - len(tokens))
        if rng.random() < noise:
            tokens += [v.FIRST_NODE + rng.randrange(v.NUM_NODES) for _ in range(length)]
        else:
            tokens += v.filler_run(v.draw_word(rng), length, follower)
    return tokens


def accuracy(example: Example, predicted: Sequence[int], kinds: Collection[TokenKind]) -> float:
    """Return the share of correct trace tokens of these kinds.

    predicted: teacher-forced argmax, aligned with the trace: `predicted[i]` is the guess for `trace[i]`,
               made after the prompt and the gold `trace[:i]`
    """
    if len(predicted) != len(example.trace):
        raise InvalidArgumentError(
            f"got {len(predicted)} predictions for {len(example.trace)} tokens of trace; give one for each"
        )
    triples = zip(example.trace, predicted, example.kinds, strict=True)
    right = [gold == guess for gold, guess, kind in triples if kind in kinds]
    if not right:
        raise InvalidArgumentError(f"no token of the trace is of the kinds {sorted(k.value for k in kinds)}")
    return sum(right) / len(right)


def progress(example: Example, generated: Sequence[int]) -> float:
    """Return the fraction of the trace generated before the first error; the rest is ignored."""
    num_right = 0
    for gold, token in zip(example.trace, generated, strict=False):
        if gold != token:
            break
        num_right += 1
    return num_right / len(example.trace)


def exact_match(example: Example, generated: Sequence[int]) -> bool:
    """Whether the whole trace was generated, `<eos>` included; anything after `<eos>` is ignored."""
    return tuple(generated[: len(example.trace)]) == example.trace
