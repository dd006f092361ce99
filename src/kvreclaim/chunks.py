"""Parts of a prompt that are computed once and reused wherever they stand."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvreclaim.checks import require
from kvreclaim.options import MAX_COUNT, check_options, option, settings_of

WHOLE = "whole"
SELECTIONS = ("change", "question", "deviation", "first", "random", "all", "none")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A document, or another part of a prompt, that other prompts have too, in other places: text, or token
    ids. Raises: InvalidArgumentError where it is empty."""

    content: str | tuple[int, ...] | list[int]

    def __post_init__(self) -> None:
        require(
            isinstance(self.content, (str, tuple, list)) and len(self.content) > 0,
            f"a chunk is {str(self.content)[:40]!r}; pass text or token ids that are not empty.",
            "prompt",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkReuse:
    """Which tokens of reused chunks are computed anew, among all that a prompt holds. Raises:
    InvalidArgumentError.

    select: change:    those whose change the question would notice: by the score of deviation times the
                       root of that of question, and the first tokens of each chunk
            question:  those that the tokens behind the last chunk attend to most, over late layers (InfoFlow,
                       arXiv 2603.05353), and the first tokens of each chunk
            deviation: those whose values in the second layer change most (CacheBlend, arXiv 2405.16444)
            first:     the first tokens of each chunk (EPIC, arXiv 2410.15332)
            random, all, none: to compare with
    share:  of the tokens that could be reused, under all but the last two
    first:  under change and question, so many first tokens of each chunk beside (in the share)
    seed:   of random
    lead:   a chunk is computed alone behind so many first tokens of the prompt, as far as they stand before
            its first chunk: all attend to the first tokens of a text more than these say, and a chunk in the
            midst of a prompt is to have none of these (APE, arXiv 2502.05431, section 4.1)
    """

    select: str = option("change", "Whom to compute anew.", choices=SELECTIONS)
    share: float = option(0.15, "Of what could be reused.", low=0.0, high=1.0)
    first: int = option(4, "First tokens of each chunk, under change and question.", low=0, high=MAX_COUNT)
    seed: int = option(0, "Of random.", low=0, high=MAX_COUNT)
    lead: int = option(
        16, "First tokens of the prompt that chunks are computed behind.", low=0, high=MAX_COUNT
    )

    def __post_init__(self) -> None:
        check_options(self, "chunk_reuse: {}")

    @property
    def tries(self) -> bool:
        """Whether the question is computed over the chunks as they are first, uncompressed."""
        return self.select in ("change", "question")


@dataclass(frozen=True, slots=True)
class Chunks:
    """Where chunks stand in a prompt, each from its first token up to the one behind its last, in order; and
    how they are reused. Raises: InvalidArgumentError where they overlap."""

    spans: tuple[tuple[int, int], ...]
    reuse: ChunkReuse = ChunkReuse()

    def __post_init__(self) -> None:
        edges = [edge for span in self.spans for edge in span]
        require(
            all(a < b for a, b in self.spans) and edges == sorted(edges) and (not edges or edges[0] >= 0),
            f"chunks stand at {list(self.spans)[:8]}; pass (first, behind the last) of each, in order.",
            "prompt",
        )

    def check(self, num_prompt: int) -> None:
        """Raise InvalidArgumentError unless something of the prompt stands behind them."""
        require(
            not self.spans or self.spans[-1][1] < num_prompt,
            "a prompt ends with a chunk; put what is asked about the chunks behind them.",
            "prompt",
        )


def chunk_reuse_of(text: str) -> ChunkReuse | None:
    """How chunks are reused, written as select or select(option=value); None for "whole". Raises:
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
