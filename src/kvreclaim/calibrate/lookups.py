"""Documents to look things up in: prose with facts strewn in evenly, and questions with one answer each."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreclaim.checks import require

if TYPE_CHECKING:
    from kvreclaim.model.loader import Tokenizer

KINDS = ("sentences", "records", "chains", "words")
ADJECTIVES = "amber brisk calm dusty eager faded gentle hollow icy jolly keen lively mellow noble olive pale"
NOUNS = (
    "anchor basket candle drum engine feather garden hammer island jacket kettle ladder mirror needle oven"
)
RECORDS, LINKS, WORDS, REPEATS = 4, 3, 12, 5
"""Records of a list, variables of a chain; different words of a word list, times that it has one of them."""


@dataclass(frozen=True)
class Question:
    """Token ids to be read after the document, and those of the answer that it demands."""

    kind: str
    question: list[int]
    answer: list[int]


@dataclass(frozen=True)
class LookupDocument:
    """kind: of its facts, several joined by "+"; questions: evenly over the document, kind by kind"""

    kind: str
    prompt: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class _Fact:
    """pieces: strewn over the document in this order"""

    pieces: list[str]
    question: str
    answer: str


def lookup_documents(
    tokenizer: Tokenizer,
    prose: Sequence[int],
    *,
    count: int,
    num_tokens: int,
    seed: int = 0,
    kinds: Sequence[str] = KINDS,
    facts_share: float = 0.5,
    asked: int = 4,
) -> list[LookupDocument]:
    """Make documents of prose and facts of all these kinds.

    - sentences: a thing has a number
    - records:   lists of JSON lines, a random id has a number
    - chains:    variables, the first has a number, each other is another one
    - words:     lists in which one word is repeated

    Args:
        prose:       token ids of a text; documents get windows of it that begin evenly over it
        count:       number of documents; the same seed, prose and sizes give the same ones
        num_tokens:  length of each prompt, exactly
        facts_share: largest part of a document that is facts; each kind takes an equal part of them
        asked:       questions of each kind, or fewer where a document holds fewer facts of it

    Raises: InvalidArgumentError for an unknown kind, prose that is too short, documents too short for a fact.
    """
    for kind in kinds:
        require(
            kind in KINDS, f"kind {kind!r} of look-ups is unknown; kinds are {', '.join(KINDS)}.", "kinds"
        )
    require(
        len(prose) >= num_tokens,
        f"look-up documents of {num_tokens} tokens need as many of prose and got {len(prose)}; pass a longer "
        "text.",
        "prose",
    )
    prose = [token for token in prose if token not in tokenizer.all_special_ids]
    made = []
    for number in range(count):
        start = (len(prose) - num_tokens) * number // count
        rng = random.Random(f"{seed} {number}")
        made.append(_document(tokenizer, prose[start:], num_tokens, rng, kinds, facts_share, asked))
    return made


def _document(
    tokenizer: Tokenizer,
    prose: Sequence[int],
    num_tokens: int,
    rng: random.Random,
    kinds: Sequence[str],
    facts_share: float,
    asked: int,
) -> LookupDocument:
    facts = _facts(tokenizer, int(num_tokens * facts_share), rng, kinds)
    require(
        any(facts.values()),
        f"look-up documents of {num_tokens} tokens have no room for a fact; make them longer.",
        "num_tokens",
    )
    placed = []
    for own in facts.values():
        for number, fact in enumerate(own):
            for part, piece in enumerate(fact.pieces):
                place = (part + (number + 0.5) / len(own)) / len(fact.pieces)
                placed.append((place, _encode(tokenizer, piece)))
    inserts = [tokens for _, tokens in sorted(placed, key=lambda one: one[0])]
    begin = tokenizer.bos_token_id
    prompt = [begin] if begin is not None and begin in tokenizer.encode("") else []
    left = num_tokens - len(prompt) - sum(map(len, inserts))
    cuts = [left * number // (len(inserts) + 1) for number in range(len(inserts) + 2)]
    for (first, end), tokens in zip(itertools.pairwise(cuts), [*inserts, []], strict=True):
        prompt += [*prose[first:end], *tokens]
    questions = [
        _question(tokenizer, kind, own[(2 * n + 1) * len(own) // (2 * count)])
        for kind, own in facts.items()
        for count in [min(asked, len(own))]
        for n in range(count)
    ]
    return LookupDocument("+".join(kinds), prompt, questions)


def _facts(
    tokenizer: Tokenizer, num_tokens: int, rng: random.Random, kinds: Sequence[str]
) -> dict[str, list[_Fact]]:
    """Facts for which there is room, in equal parts: the kind with the fewest tokens is next."""
    keys = _keys(rng)
    facts: dict[str, list[_Fact]] = {kind: [] for kind in kinds}
    used = dict.fromkeys(kinds, 0)
    while True:
        kind = min(used, key=lambda kind: used[kind])
        fact = _fact(kind, rng, keys)
        size = sum(len(_encode(tokenizer, piece)) for piece in fact.pieces)
        if sum(used.values()) + size > num_tokens:
            return facts
        facts[kind].append(fact)
        used[kind] += size


def _keys(rng: random.Random) -> Iterator[tuple[str, str]]:
    """Names that never come twice."""
    pairs = list(itertools.product(ADJECTIVES.split(), NOUNS.split()))
    rng.shuffle(pairs)
    for turn in itertools.count(1):
        for adjective, noun in pairs:
            yield adjective, noun if turn == 1 else f"{noun}{turn}"


def _fact(kind: str, rng: random.Random, keys: Iterator[tuple[str, str]]) -> _Fact:
    number = str(rng.randrange(10_000, 100_000))
    if kind == "sentences":
        name = " ".join(next(keys))
        text = f"\nThe {name} weighs {number} grams.\n"
        return _Fact([text], f"\nHow many grams does the {name} weigh? It weighs", f" {number}")
    if kind == "records":
        rows = {f"{rng.getrandbits(40):010x}": rng.randrange(10_000, 100_000) for _ in range(RECORDS)}
        sought = rng.choice(list(rows))
        text = "".join(f'\n{{"id": "{key}", "stock": {value}}}' for key, value in rows.items())
        return _Fact([text + "\n"], f"\nWhat is the stock of id {sought}? It is", f" {rows[sought]}")
    if kind == "chains":
        names = ["_".join(next(keys)) for _ in range(LINKS)]
        values = [number, *names]
        pieces = [f"\n{name} = {value}\n" for name, value in zip(names, values, strict=False)]
        return _Fact(pieces, f"\nWhich number does {names[-1]} hold? It holds", f" {number}")
    _, title = next(keys)
    name = f"{title}-{number}"
    words = rng.sample(NOUNS.split(), WORDS)
    listed = words + [words[0]] * (REPEATS - 1)
    rng.shuffle(listed)
    text = f"\nWords of list {name}: {', '.join(listed)}.\n"
    return _Fact([text], f"\nMost frequent word of list {name}:", f" {words[0]}")


def _question(tokenizer: Tokenizer, kind: str, fact: _Fact) -> Question:
    """Split a fact's tokens into question and answer, which begins at the first token that depends on it."""
    question, whole = _encode(tokenizer, fact.question), _encode(tokenizer, fact.question + fact.answer)
    same = next(n for n, (one, other) in enumerate(zip([*question, -1], whole, strict=False)) if one != other)
    return Question(kind, whole[:same], whole[same:])


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))
