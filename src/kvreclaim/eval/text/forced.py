"""Text tasks with given answers (teacher forcing): a passage with facts in it, then questions and their
answers, each token of an answer a verdict. Needs no chat template and no parsing, so it works for any
language model, and an early error affects no later verdict."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.passages import Passages, woven
from kvreclaim.eval.task import SEED_STRIDE, Answer, Item, PlainTask, TaskScore
from kvreclaim.model.loader import Tokenizer

HEAD = "Read these texts. Access codes are told in them.\n\n"


@dataclass(frozen=True, slots=True)
class Quiz:
    """The questions of one example.

    facts:     sentences, at random places of the passage, or all at one place, together
    questions: (text before the answer, answer, index of the fact that holds it), in order
    """

    facts: Sequence[str]
    questions: Sequence[tuple[str, str, int]]
    together: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """One judged token: its place in the continuation, and its evidence as a share of the sequence."""

    place: int
    evidence: float


@dataclass(frozen=True)
class ForcedTask(PlainTask):
    """Sequences of exactly num_tokens tokens. A subclass writes the quiz.

    known: the first question is at the prompt's end, and only its answer is judged, without its first token,
           which the prompt's last row predicts before any compression; else all questions follow the prompt
    num_chunks: the passage consists of this many documents, with facts dealt to them, after a head; the first
           question is at the prompt's end, and all of its answer is judged
    """

    tokenizer: Tokenizer
    passages: Passages
    num_tokens: int
    known: bool = False
    num_chunks: int = 0

    @property
    @abstractmethod
    def kind(self) -> str:
        """The name, whether or not the question is known."""

    @abstractmethod
    def write(self, rng: random.Random) -> Quiz:
        """The facts and questions of one example."""

    @property
    def name(self) -> str:
        return f"{self.kind}:known" if self.known else f"{self.kind}:chunks" if self.num_chunks else self.kind

    @property
    def identity(self) -> Mapping[str, Any]:
        fields = {"dialect": "text", "passages": self.passages.digest, "num_tokens": self.num_tokens}
        return fields | ({"num_chunks": self.num_chunks} if self.num_chunks else {})

    @property
    def has_one_question(self) -> bool:
        """Whether the first question is part of the prompt, and the only one."""
        return self.known or self.num_chunks > 0

    def item(self, seed: int, index: int) -> Item:
        rng = random.Random(f"{self.kind}:{seed}:{index}")
        quiz = self.write(rng)
        questions = quiz.questions[:1] if self.has_one_question else quiz.questions
        encoded = [self._answer(head, answer) for head, answer, _ in questions]
        tail, continuation, judged = self._lay_out(encoded)
        facts = [self._encode(fact) for fact in quiz.facts]
        room = self._room(facts, len(tail) + len(continuation))
        prefix = [*self.passages.prefix, *(self._encode(HEAD) if self.num_chunks else ())]
        number = seed * SEED_STRIDE + index
        chunks: tuple[tuple[int, int], ...] = ()
        if self.num_chunks:
            body, places, chunks = self._documents(rng, number, room, facts, len(prefix))
        else:
            body, places = woven(rng, self.passages.window(number, room), facts, together=quiz.together)
        prompt, starts = (*prefix, *body, *tail), [len(prefix) + place for place in places]
        verdicts = tuple(
            Verdict(place, starts[questions[number][2]] / self.num_tokens) for place, number in judged
        )
        return Item(prompt, continuation, chunks=chunks, payload=verdicts)

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        verdicts: tuple[Verdict, ...] = item.payload
        right = [answer.predicted[v.place] == item.continuation[v.place] for v in verdicts]
        nll = -sum(answer.logprobs[v.place] for v in verdicts) / len(verdicts)
        return TaskScore(
            points=sum(right),
            out_of=len(right),
            found=tuple(v.evidence for v, ok in zip(verdicts, right, strict=True) if ok),
            lost=tuple(v.evidence for v, ok in zip(verdicts, right, strict=True) if not ok),
            extra={"nll": nll},
        )

    def _documents(
        self, rng: random.Random, number: int, room: int, facts: Sequence[list[int]], first: int
    ) -> tuple[list[int], list[int], tuple[tuple[int, int], ...]]:
        """Return the tokens of all documents, the start of each fact in them, and the span of each document
        in the prompt; the first one begins at `first`."""
        dealt = [rng.randrange(self.num_chunks) for _ in facts]
        body: list[int] = []
        starts, spans = [0] * len(facts), []
        for place in range(self.num_chunks):
            own = [i for i, home in enumerate(dealt) if home == place]
            length = room * (place + 1) // self.num_chunks - room * place // self.num_chunks
            passage = self.passages.window(number * self.num_chunks + place, length)
            text, places = woven(rng, passage, [facts[i] for i in own]) if own else (passage, [])
            for i, at in zip(own, places, strict=True):
                starts[i] = len(body) + at
            spans.append((first + len(body), first + len(body) + len(text)))
            body += text
        return body, starts, tuple(spans)

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def _answer(self, head: str, answer: str) -> tuple[list[int], list[int]]:
        """Tokens of a question and of its answer, split where the tokenizer splits the whole line."""
        before, line = self._encode(head), self._encode(head + answer)
        cut = next((i for i, (a, b) in enumerate(zip(before, line, strict=False)) if a != b), len(before))
        return line[:cut], line[cut:]

    def _lay_out(
        self, encoded: Sequence[tuple[list[int], list[int]]]
    ) -> tuple[list[int], tuple[int, ...], list[tuple[int, int]]]:
        """Return the prompt's tail, the continuation, and (position in it, question) of each judged token."""
        tail: list[int] = []
        continuation: list[int] = []
        judged: list[tuple[int, int]] = []
        for number, (head, answer) in enumerate(encoded):
            if self.has_one_question:
                tail += head
            else:
                continuation += head
            places = range(len(continuation), len(continuation) + len(answer))
            judged += [(place, number) for place in places[self.known :]]
            continuation += answer
        return tail, tuple(continuation), judged

    def _room(self, facts: Sequence[list[int]], num_quiz: int) -> int:
        """Tokens of the passage. Raises: InvalidArgumentError if facts and questions leave too few."""
        head = len(self._encode(HEAD)) if self.num_chunks else 0
        room = self.num_tokens - num_quiz - len(self.passages.prefix) - head - sum(map(len, facts))
        if room < max(len(facts), self.num_chunks * (len(facts) + 1)):
            raise InvalidArgumentError(
                f"task {self.name} needs {self.num_tokens - room + len(facts)} tokens without any passage, "
                f"but a sequence has {self.num_tokens}; raise the number of tokens."
            )
        return room
