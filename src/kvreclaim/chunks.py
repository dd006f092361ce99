"""Parts of a prompt that are computed once and reused at any position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvreclaim.checks import require
from kvreclaim.options import MAX_COUNT, check_options, option, settings_of

WHOLE = "whole"
SELECTIONS = ("change", "question", "deviation", "first", "random", "all", "none")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A document that several prompts contain, at any position: text or token ids. Raises:
    InvalidArgumentError if it is empty."""

    content: str | tuple[int, ...] | list[int]

    def __post_init__(self) -> None:
        require(
            isinstance(self.content, (str, tuple, list)) and len(self.content) > 0,
            f"a chunk is {str(self.content)[:40]!r}; pass text or token ids that are not empty.",
            "prompt",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReuse:
    """Which tokens of a prompt's reused chunks are recomputed. Raises: InvalidArgumentError.

    select: change:    tokens with the largest effect of their change on the question: the score of deviation
                       times the root of the score of question, and the first tokens of each chunk
            question:  tokens that the text after the last chunk attends to most, in late layers (InfoFlow,
                       arXiv 2603.05353), and the first tokens of each chunk
            deviation: tokens with the most changed values in the second layer (CacheBlend, arXiv 2405.16444)
            first:     the first tokens of each chunk (EPIC, arXiv 2410.15332)
            random, all, none: for comparison
    share:  recomputed share of the reusable tokens; unused by all and none
    first:  number of first tokens per chunk under change and question; they count in the share
    seed:   of random
    lead:   a chunk is computed alone after this many first tokens of the prompt (fewer if the first chunk
            comes earlier). They take the role of attention sinks, so no token of the chunk does (APE, arXiv
            2502.05431, section 4.1)
    """

    select: str = option("change", "Which tokens to recompute.", choices=SELECTIONS)
    share: float = option(0.15, "Share of the reusable tokens to recompute.", low=0.0, high=1.0)
    first: int = option(4, "First tokens of each chunk, under change and question.", low=0, high=MAX_COUNT)
    seed: int = option(0, "Seed of random.", low=0, high=MAX_COUNT)
    lead: int = option(
        16, "First tokens of the prompt after which each chunk is computed.", low=0, high=MAX_COUNT
    )

    def __post_init__(self) -> None:
        check_options(self, "chunk_reuse: {}")

    @property
    def tries(self) -> bool:
        """Return whether the question is first computed over the chunks as they are, uncompressed."""
        return self.select in ("change", "question")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Positions of the chunks in a prompt, (first, end) in order, and how they are reused. Raises:
    InvalidArgumentError if they overlap."""

    spans: tuple[tuple[int, int], ...]
    reuse: ChunkReuse = ChunkReuse()

    def __post_init__(self) -> None:
        edges = [edge for span in self.spans for edge in span]
        require(
            all(a < b for a, b in self.spans) and edges == sorted(edges) and (not edges or edges[0] >= 0),
            f"chunks are at {list(self.spans)[:8]}; pass (first, end) of each, in order, without overlap.",
            "prompt",
        )

    def check(self, num_prompt: int) -> None:
        """Raise InvalidArgumentError unless the prompt goes on after the last chunk."""
        require(
            not self.spans or self.spans[-1][1] < num_prompt,
            "a prompt ends with a chunk; put the question after the chunks.",
            "prompt",
        )


def chunk_reuse_of(text: str) -> ChunkReuse | None:
    """Parse chunk reuse, written as select or select(option=value); None for "whole". Raises:
    InvalidArgumentError."""
    from kvreclaim.compression.spec.grammar import Spec, parse_spec

    spec = Spec(text) if text == "none" else parse_spec(text, "chunk reuse")  # else a value
    if spec.name == WHOLE and not spec.args:
        return None
    require(
        spec.name in SELECTIONS,
        f"chunk reuse {spec.name!r} is unknown; known are {', '.join((WHOLE, *SELECTIONS))}.",
    )
    names = [name for name in settings_of(ChunkReuse) if name != "select"]
    for name, value in spec.args:
        require(
            name in names,
            f"chunk reuse {spec.name} is given {value if name is None else name!r}; its options, each "
            f"written option=value, are {', '.join(names)}.",
        )
    given: dict[str, Any] = {name: value for name, value in spec.args if name is not None}
    return ChunkReuse(select=spec.name, **given)
