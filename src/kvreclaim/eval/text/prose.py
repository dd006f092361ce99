"""Filler without facts, facts spread in it, and prompts that fit a number of tokens."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvreclaim.model.loader import Tokenizer


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


_SUBJECTS = _words(
    "The gardener, A tired clerk, The old ferryman, Her neighbour, The baker, A travelling student, "
    "The carpenter, My uncle, The night porter, A young teacher, The miller, The postman"
)
_VERBS = _words(
    "waited for, walked past, asked about, wrote a letter about, looked after, dreamed of, paid for, "
    "laughed at, forgot, remembered, described, painted"
)
_OBJECTS = _words(
    "the small garden, a basket of apples, the harbour wall, the broken clock, a warm coat, "
    "the empty square, the wooden stairs, a quiet afternoon, the first snow, the long road, "
    "a cup of tea, the village fair"
)
_ENDINGS = _words(
    "before the rain came, while the bells rang, without saying much, on a grey morning, "
    "as everyone expected, for the third time, after the market closed, until the lamps were lit"
)


@dataclass(frozen=True)
class ProseQuestion:
    """A prompt with its answer.

    text:     the whole prompt
    answer:   expected parts
    evidence: position of each part of the answer, as a share of the text
    """

    text: str
    answer: tuple[str, ...]
    evidence: tuple[float, ...] = ()


@dataclass(frozen=True)
class Encoder:
    """Encodes text as one user turn of the tokenizer's chat template if it has one.

    system: the system prompt before it; only for tokenizers with a chat template
    """

    tokenizer: Tokenizer
    system: str | None = None

    def __call__(self, text: str) -> tuple[int, ...]:
        return self.tokens(self.render(text))

    def render(self, text: str) -> str:
        """The text in the chat template."""
        if self.identity is None:
            return text
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return self.chat([*system, {"role": "user", "content": text}])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Render a conversation, up to the model's answer."""
        turns = [dict(message) for message in messages]
        return str(self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False))

    def require_template(self, task: str, model: str) -> None:
        """Raises: InvalidArgumentError for a tokenizer without chat template."""
        require(
            self.identity is not None,
            f"task {task} needs a chat template, and the tokenizer of {model} has none; take a model that "
            "was tuned to follow instructions.",
        )

    def tokens(self, rendered: str) -> tuple[int, ...]:
        """Encode the result of `render`, or its beginning; a template writes special tokens itself."""
        return tuple(self.tokenizer.encode(rendered, add_special_tokens=self.identity is None))

    @property
    def identity(self) -> str | None:
        """The template's text, which determines the prompt."""
        template = getattr(self.tokenizer, "chat_template", None)
        return str(template) if template else None


def sentence(rng: random.Random) -> str:
    """Make a sentence without facts."""
    return f"{' '.join(map(rng.choice, (_SUBJECTS, _VERBS, _OBJECTS, _ENDINGS)))}."


def spread(
    rng: random.Random, facts: Sequence[str], depths: Sequence[float], num_sentences: int
) -> tuple[str, list[float]]:
    """Put each fact at its depth (0 start, 1 end) among num_sentences of filler.

    Returns: the text, and the position of each fact as a share of the text's characters.
    """
    lines = [(i / max(1, num_sentences), sentence(rng), -1) for i in range(num_sentences)]
    lines += [(depth, fact, i) for i, (fact, depth) in enumerate(zip(facts, depths, strict=True))]
    lines.sort(key=lambda line: line[0])
    starts, length = [0] * len(facts), 0
    for _, text, index in lines:
        if index >= 0:
            starts[index] = length
        length += len(text) + 1
    return " ".join(text for _, text, _ in lines), [start / max(1, length) for start in starts]


def framed(head: str, story: str, tail: str, places: Sequence[float]) -> tuple[str, tuple[float, ...]]:
    """Return the whole text, and places in the story as shares of it."""
    text = head + story + tail
    return text, tuple((len(head) + place * len(story)) / len(text) for place in places)


def fit(
    write: Callable[[int], ProseQuestion], encode: Encoder, most: int, what: str
) -> tuple[ProseQuestion, tuple[int, ...]]:
    """Return the longest prompt of at most `most` tokens from write(number of filler sentences).

    Raises: InvalidArgumentError if the prompt without filler is too long.
    """

    def tokens(count: int) -> tuple[int, ...]:
        return encode(write(count).text)

    least = len(tokens(0))
    if least > most:
        raise InvalidArgumentError(
            f"task {what} needs {least} tokens of prompt without any filler, but {most} are left next to the "
            "answer; raise the number of tokens or lower the answer's."
        )
    per_sentence = (len(tokens(16)) - least) / 16
    if not per_sentence:
        return write(0), tokens(0)
    count = int((most - least) / per_sentence)
    while count and (over := len(tokens(count)) - most) > 0:
        count = max(0, count - max(1, int(over / per_sentence)))
    while len(tokens(count + 1)) <= most:
        count += 1
    return write(count), tokens(count)
