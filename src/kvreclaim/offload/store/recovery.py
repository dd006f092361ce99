"""Recovery of usable records at a start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvreclaim.memory.prefix.keys import BlockName


@dataclass(frozen=True, slots=True)
class Recovered:
    """A slot's record. written_at: Unix seconds."""

    slot: int
    record: BlockName
    seq: int
    written_at: int


def latest(found: Iterable[Recovered]) -> list[Recovered]:
    """The last record of each key, the oldest first."""
    last: dict[bytes, Recovered] = {}
    for each in found:
        other = last.get(each.record.key)
        if other is None or other.seq < each.seq:
            last[each.record.key] = each
    return sorted(last.values(), key=lambda each: each.seq)


def usable(found: Iterable[Recovered]) -> list[Recovered]:
    """Return the last record of each key with all ancestors present, parents first.

    The parent is the record with the uid, key and depth named by the child, so prefixes with colliding keys
    keep their own children.
    """
    reached: dict[bytes, tuple[bytes, int]] = {}
    kept = []
    for each in sorted(latest(found), key=lambda each: each.record.depth):
        mine = each.record
        if mine.depth == 0 or reached.get(mine.parent_uid) == (mine.parent, mine.depth - 1):
            reached[mine.uid] = (mine.key, mine.depth)
            kept.append(each)
    return kept
