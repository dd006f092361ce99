"""The user's own questions: JSON lines with "prompt" and "answer"."""

from __future__ import annotations

import hashlib
import os
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvreclaim.checks import parse_json
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.task import Answer, Item, PlainTask, TaskScore
from kvreclaim.eval.text.base import final_part
from kvreclaim.eval.text.prose import Encoder

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


@dataclass(frozen=True)
class JsonlTask(PlainTask):
    """One question a line. Right if an accepted answer is contained in what was generated, in whole words,
    or, with exact, is all of it; both after normalisation (lower case, no punctuation, no articles, except
    for an answer that is only an article: "A").

    questions: (prompt, accepted answers)
    """

    name: str
    encode: Encoder
    questions: tuple[tuple[str, tuple[str, ...]], ...]
    max_new_tokens: int
    exact: bool = False
    seeded = False

    @cached_property
    def identity(self) -> Mapping[str, Any]:
        return {
            "questions": hashlib.sha256(repr(self.questions).encode()).hexdigest()[:24],
            "template": self.encode.identity,
            "max_new_tokens": self.max_new_tokens,
            "exact": self.exact,
        }

    def num_examples(self, wanted: int) -> int:
        return min(wanted, len(self.questions))

    def item(self, seed: int, index: int) -> Item:
        prompt, answers = self.questions[index]
        return Item(self.encode(prompt), max_new_tokens=self.max_new_tokens, payload=answers)

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        text = final_part(answer.text)
        right = any(self._says(text, accepted) for accepted in item.payload)
        return TaskScore(points=float(right), out_of=1)

    def _says(self, text: str, accepted: str) -> bool:
        articles = not normalise(accepted)  # an answer such as "A" is nothing but one
        wanted, said = normalise(accepted, articles=articles), normalise(text, articles=articles)
        return said == wanted if self.exact else f" {wanted} " in f" {said} "


def normalise(text: str, *, articles: bool = False) -> str:
    """Lower case, single spaces, punctuation removed, and English articles unless `articles` keeps them."""
    words = text.casefold().translate(_PUNCTUATION)
    return " ".join((words if articles else _ARTICLES.sub(" ", words)).split())


def read_questions(path: Path) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Read the questions of one file, or of all *.jsonl of a directory in the order of their names.

    Raises: InvalidArgumentError naming file and line.
    """
    files = sorted(path.glob("*.jsonl")) if os.path.isdir(path) else [path]
    questions = [question for file in files for question in _read_file(file)]
    if not questions:
        raise InvalidArgumentError(
            f"{str(path)!r} holds no questions; pass a file, or a directory of *.jsonl files, of lines "
            '{"prompt": "...", "answer": "..."}.'
        )
    return tuple(questions)


def _read_file(file: Path) -> list[tuple[str, tuple[str, ...]]]:
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # splitlines also splits at U+2028
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"the questions {str(file)!r} cannot be read: {error}.") from error
    return [_question(line, f"{file}, line {i}") for i, line in enumerate(lines, 1) if line.strip()]


def _question(line: str, where: str) -> tuple[str, tuple[str, ...]]:
    try:
        record = parse_json(line)
        prompt, answer = record["prompt"], record["answer"]
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f'{where} is no question; write {{"prompt": "...", "answer": "..."}} in one line.'
        ) from error
    answers: Sequence[Any] = answer if isinstance(answer, list) else [answer]
    strings = isinstance(prompt, str) and all(
        isinstance(text, str) and normalise(text, articles=True) for text in answers
    )
    if not (prompt and answers and strings):
        raise InvalidArgumentError(
            f"{where} has prompt {prompt!r:.40} and answer {answer!r:.40}; the prompt must be text, the "
            "answer text or a list of texts that hold a letter or a digit."
        )
    return prompt, tuple(answers)
