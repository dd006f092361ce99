"""The user's own questions: JSON lines with "prompt" and "answer"."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from kvreclaim.checks import parse_json
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.task import Answer, Item, PlainTask, TaskScore
from kvreclaim.eval.text.base import final_part
from kvreclaim.eval.text.prose import Encoder

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
_NUMBER = re.compile(r"((?:(?<![\w)\]])[-–−])?)([$€£¥]?)((?:\d+|(?<![\w.])(?=\.\d))(?:\.\d+)*)")
_UNSPACED = re.compile(r"([\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff])")
"""Scripts without spaces: each character is a word."""
_WIDE = {0xFF01 + offset: 0x21 + offset for offset in range(94)}
"""Full-width forms of ASCII."""
_MINUS, _POINT = "\ue000", "\ue001"
"""Private characters that replace the marks of a number while punctuation is removed."""


@dataclass(frozen=True)
class JsonlTask(PlainTask):
    """One question per line. Correct if an accepted answer is contained in the generated text, in whole
    words, or, with exact, equals it; both after normalisation (see normalise; an answer that is only an
    article, such as "A", is compared with articles kept).

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
        right = any(self._matches(text, accepted) for accepted in item.payload)
        return TaskScore(points=float(right), out_of=1)

    def _matches(self, text: str, accepted: str) -> bool:
        articles = not normalise(accepted)  # an answer such as "A" is only an article
        expected, given = normalise(accepted, articles=articles), normalise(text, articles=articles)
        return given == expected if self.exact else f" {expected} " in f" {given} "


def normalise(text: str, *, articles: bool = False) -> str:
    """Return the words of a text in lower case, with single spaces.

    Unicode's punctuation and ASCII's symbols become spaces. A number keeps its minus sign and its decimal
    points, and loses the commas between thousands. Each Chinese or Japanese character is a word.

    articles: keep English articles
    """
    words = _NUMBER.sub(_marked, _THOUSANDS.sub(_joined, text.casefold().translate(_WIDE)))
    words = _UNSPACED.sub(r" \1 ", words.translate(_spaces()))
    if not articles:
        words = _ARTICLES.sub(" ", words)
    return " ".join(words.split()).replace(_MINUS, "-").replace(_POINT, ".")


def _joined(number: re.Match[str]) -> str:
    return number[0].replace(",", "")


def _marked(number: re.Match[str]) -> str:
    """Replace the marks of a number by private characters; ".5" is 0.5."""
    sign, _, digits = number.groups()
    digits = f"0{digits}" if digits.startswith(".") else digits
    return f" {_MINUS}{digits.replace('.', _POINT)}" if sign else digits.replace(".", _POINT)


@cache
def _spaces() -> Mapping[int, str]:
    """Punctuation, the symbols of ASCII and signs of currencies, each replaced by a space."""
    marks = (chr(code) for code in range(sys.maxunicode + 1))
    return {
        ord(mark): " "
        for mark in marks
        for kind in [unicodedata.category(mark)]
        if kind[0] == "P" or kind == "Sc" or (kind[0] == "S" and mark.isascii())
    }


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
