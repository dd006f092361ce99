"""Pairs of features that the table of refusals does not exclude, each with the test file that covers it."""

from __future__ import annotations

from pathlib import Path

from kvreclaim.refusals import Feature


def supported_pairs() -> dict[frozenset[Feature], str]:
    """Return pair -> test file, from lines "FILE: FEATURE with OTHERS" of supported_pairs.txt."""
    found: dict[frozenset[Feature], str] = {}
    for line in Path(__file__).with_name("supported_pairs.txt").read_text().splitlines():
        file, _, text = line.partition(": ")
        first, _, others = text.partition(" with ")
        for other in others.split():
            pair = frozenset((Feature[first], Feature[other]))
            assert len(pair) == 2, f"{first} stands twice in: {line}"
            assert pair not in found, f"a pair of {line!r} also stands with {found.get(pair)}"
            found[pair] = file
    return found
