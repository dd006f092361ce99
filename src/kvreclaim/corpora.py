"""Text that every machine has: what a model may be calibrated on, and what it is judged by.

The two never share a paragraph. They change with the version of Python, and with nothing else.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

CALIBRATION_SHARE = 2 / 3
_PARAGRAPH = "\n\n"


class Texts(NamedTuple):
    """Two texts of one kind."""

    calibration: str
    evaluation: str


def prose() -> Texts:
    """English: the language reference inside the standard library (`pydoc_data.topics`), by name of topic."""
    from pydoc_data.topics import topics

    return split(topics[name] for name in sorted(topics))


def code() -> Texts:
    """Python: the standard library's modules that are no packages, by name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return split(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


def split(parts: Iterable[str]) -> Texts:
    """Whole parts, in their order: the calibration text gets those that begin within the first two thirds of
    the characters, the evaluation the others. A repeated paragraph is left out, and one that is in
    both is the evaluation's."""
    parts = list(parts)
    limit, begun = CALIBRATION_SHARE * sum(map(len, parts)), 0
    sides: tuple[list[str], list[str]] = ([], [])
    for part in parts:
        sides[begun >= limit].append(part)
        begun += len(part)
    seen: set[str] = set()
    evaluation = _PARAGRAPH.join(_new_paragraphs(sides[1], seen))
    return Texts(_PARAGRAPH.join(_new_paragraphs(sides[0], seen)), evaluation)


def _new_paragraphs(parts: Iterable[str], seen: set[str]) -> Iterator[str]:
    """Yield the paragraphs with words that are not in `seen`, and add them to it."""
    for part in parts:
        for paragraph in part.split(_PARAGRAPH):
            words = " ".join(paragraph.split())
            if words and words not in seen:
                seen.add(words)
                yield paragraph.strip("\n")
