"""Every question of a look-up document is answered by its text, and by nothing else."""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import pairwise

import pytest
import tiny

from kvreclaim.calibrate.lookups import KINDS, LookupDocument, lookup_documents
from kvreclaim.corpora import prose
from kvreclaim.errors import InvalidArgumentError

TOKENIZER = tiny.tokenizer()
PROSE = TOKENIZER.encode(prose().calibration[:20_000])


def made(**options) -> list[LookupDocument]:
    return lookup_documents(TOKENIZER, PROSE, **{"count": 2, "num_tokens": 4000, **options})


def answers(text: str) -> dict[str, set[str]]:
    """Return the values that the text has for each key, read in a way of each kind."""
    values: dict[str, set[str]] = {}
    for name, number in re.findall(r"^The (\w+ \w+) weighs (\d+) grams\.$", text, re.MULTILINE):
        values.setdefault(name, set()).add(number)
    for line in re.findall(r'^\{"id".*\}$', text, re.MULTILINE):
        values.setdefault(json.loads(line)["id"], set()).add(str(json.loads(line)["stock"]))
    held = dict(re.findall(r"^([a-z]+_[a-z0-9]+) = (\w+)$", text, re.MULTILINE))
    for name, value in held.items():
        while value in held:
            value = held[value]
        values.setdefault(name, set()).add(value)
    for name, listed in re.findall(r"^Words of list (\S+): (.*)\.$", text, re.MULTILINE):
        values.setdefault(name, set()).update(w for w, n in Counter(listed.split(", ")).items() if n > 1)
    return values


@pytest.mark.parametrize("kinds", [KINDS, *([kind] for kind in KINDS)])
def test_the_document_answers_each_question_once(kinds) -> None:
    for document in made(kinds=kinds):
        values = answers(TOKENIZER.decode(document.prompt))
        assert {question.kind for question in document.questions} == set(kinds)
        assert document.kind == "+".join(kinds)
        for question in document.questions:
            text = TOKENIZER.decode(question.question)
            (key,) = [key for key in values if re.search(rf"\b{re.escape(key)}\b", text)]
            assert values[key] == {TOKENIZER.decode(question.answer).strip()}


@pytest.mark.parametrize("num_tokens", [500, 1001, 4000])
def test_documents_have_the_given_length_and_half_of_them_is_prose(num_tokens) -> None:
    for document in made(num_tokens=num_tokens):
        assert len(document.prompt) == num_tokens
        facts = r"^(The \w+ \w+ weighs .*|\{\"id\".*|[a-z]+_[a-z0-9]+ = .*|Words of list .*)$"
        text = TOKENIZER.decode(document.prompt)
        facts_length = sum(map(len, (match[0] for match in re.finditer(facts, text, re.MULTILINE))))
        assert 0.2 < facts_length / len(text) <= 0.5


def test_facts_lie_evenly() -> None:
    (document,) = made(kinds=["sentences"], count=1)
    text = TOKENIZER.decode(document.prompt)
    places = [
        0,
        *(match.start() for match in re.finditer(r"^The \w+ \w+ weighs", text, re.MULTILINE)),
        len(text),
    ]
    gaps = [b - a for a, b in pairwise(places)]
    assert max(gaps) < 2 * min(gaps[1:-1])


def test_answers_are_not_in_the_question_and_begin_where_they_differ() -> None:
    (document,) = made(count=1)
    for question in document.questions:
        answer = TOKENIZER.decode(question.answer)
        assert answer == f" {answer.strip()}"
        assert answer.strip() not in TOKENIZER.decode(question.question)


def test_the_same_seed_gives_the_same_and_another_one_others() -> None:
    assert made() == made()
    first, second = made()
    assert first != second
    assert made(seed=1)[0] != first


def test_questions_of_a_kind_are_limited_and_spread() -> None:
    (few,) = made(count=1, asked=2, kinds=["sentences"])
    (many,) = made(count=1, asked=1000, kinds=["sentences"])
    assert len(few.questions) == 2
    every = many.questions
    assert [every.index(question) for question in few.questions] == [len(every) // 4, 3 * len(every) // 4]


@pytest.mark.parametrize(
    ("options", "field"),
    [({"kinds": ["poems"]}, "kinds"), ({"num_tokens": 30_000}, "prose"), ({"num_tokens": 40}, "num_tokens")],
)
def test_what_cannot_be_made_is_refused(options, field) -> None:
    with pytest.raises(InvalidArgumentError) as raised:
        made(**options)
    assert raised.value.field == field
