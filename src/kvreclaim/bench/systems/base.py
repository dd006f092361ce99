"""The interface of a system in the decode benchmark: fill the cache to a context, then decode in slices."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kvreclaim.errors import InvalidArgumentError

if TYPE_CHECKING:
    from kvreclaim.model.loader import LoadedModel

Fill = Literal["synthetic", "prefill"]
OURS = "kvreclaim-"
"""Prefix of our systems' names; `full` or a policy follows."""
NAMES = ("kvreclaim-full", "kvreclaim-query_mixture", "kvreclaim-triattention")
"""The default systems."""
BLOCK_SIZE = 16
"""Tokens per block of our engine."""
CHUNK = 2048
"""Tokens of one prefill step, equal in every system with such a setting."""


class SkipPoint(Exception):
    """This system cannot run this point; the message is the reported reason."""


@dataclass(frozen=True, slots=True)
class SystemSetup:
    """Settings of all systems of a run. model: a directory; dtype: "bfloat16" or "float32"."""

    model: Path
    dtype: str
    threads: int


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the grid.

    context:    tokens in each sequence's cache when timing begins
    batch:      sequences
    new_tokens: most tokens that each sequence will generate
    fill:       "prefill" computes the prompts; "synthetic" stores random keys and values instead
    """

    context: int
    batch: int
    new_tokens: int
    fill: Fill = "synthetic"
    seed: int = 0

    @property
    def overshoot(self) -> int:
        """Tokens that the first sequence may generate while the last one is still being filled."""
        return -(-self.context * self.batch // CHUNK) + self.batch

    @property
    def max_len(self) -> int:
        """Tokens that a sequence may reach."""
        return self.context + self.new_tokens + self.overshoot

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Token ids, [batch][context], that differ from the first token on; without byte and end tokens."""
        return random_prompts(self.batch, self.context, vocab_size, self.seed)


@dataclass(frozen=True, slots=True)
class Slice:
    """A timed stretch of decoding: steps, tokens of all sequences together, seconds."""

    steps: int
    tokens: int
    elapsed_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s


class Session(ABC):
    """One system at one point with a filled cache. Nothing runs between two slices."""

    fill_s: float

    @abstractmethod
    def run(self, steps: int) -> Slice:
        """Decode this many steps of all sequences. Raises SkipPoint if it cannot."""

    @abstractmethod
    def close(self) -> None:
        """Free the cache."""


class System(ABC):
    """A system under test, loaded once. `multiple`: steps of a slice are multiples of it, so that every
    slice holds its share of periodic work."""

    name: str
    multiple: int = 1

    @abstractmethod
    def open(self, point: Point) -> Session:
        """Fill the cache. Raises SkipPoint if the point cannot run here."""

    @abstractmethod
    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Greedy continuations of real prompts, for the check."""

    @abstractmethod
    def new_bytes(self, point: Point) -> int:
        """Memory needed to open the point, beyond current use; an upper estimate."""

    def facts(self) -> dict[str, object]:
        """Facts for its rows."""
        return {}

    def versions(self) -> dict[str, str]:
        """Versions in the system's own environment."""
        return {}

    def close(self) -> None:  # noqa: B027  (most hold nothing that outlives them)
        """Free all resources."""


def random_prompts(batch: int, context: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Token ids between the bytes and the last (end) token of a benchmark model; any ids of a small one."""
    low = 256 if vocab_size > 1024 else 2
    rng = random.Random(seed)
    prompts = [rng.choices(range(low, vocab_size - 1), k=context) for _ in range(batch)]
    first = rng.sample(range(low, vocab_size - 1), batch)
    for prompt, token in zip(prompts, first, strict=True):
        prompt[0] = token
    return prompts


def text_tokens(text: Path | None, num_tokens: int, loaded: LoadedModel) -> list[int]:
    """The beginning of a text, or random tokens. Raises: InvalidArgumentError for one that is too short."""
    if text is None:
        return random_prompts(1, num_tokens, loaded.vocab_size, 1)[0]
    if loaded.tokenizer is None:
        raise InvalidArgumentError(f"{loaded.facts.name} has no tokenizer for --text; leave it out.")
    tokens = loaded.tokenizer.encode(text.read_text(encoding="utf-8"))[:num_tokens]
    if len(tokens) < num_tokens:
        raise InvalidArgumentError(
            f"--text {str(text)!r} has {len(tokens)} tokens, but {num_tokens} are needed; name a longer "
            "text, or ask for fewer."
        )
    return list(tokens)
