"""`truncation: "auto"`: the items of a conversation that fit into the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from kvreclaim.engine.api.chat import SYSTEM_ROLES
from kvreclaim.server.responses.items import Item


def fitting(items: Sequence[Item], fits: Callable[[list[int]], bool | None]) -> list[int]:
    """The places of those that stay: what leads as system or developer, and of the others the latest ones
    that fit; if none do, the fewest that can be written.

    fits: whether items at these places do, None if they cannot be written; fewer ones do or cannot sooner
    """
    first = _num_leading(items)
    cuts = _cuts(items, first)

    def kept(cut: int) -> list[int]:
        return [*range(first), *range(cut, len(items))]

    found: dict[int, bool | None] = {}

    def ends(cut: int) -> bool:
        found[cut] = fits(kept(cut))
        return found[cut] is not False

    place = bisect_left(cuts, True, key=ends)
    if place == len(cuts) or found[cuts[place]] is None:
        place = max(place - 1, 0)
    return kept(cuts[place])


def _num_leading(items: Sequence[Item]) -> int:
    others = (place for place, item in enumerate(items) if item.get("role") not in SYSTEM_ROLES)
    return next(others, len(items))


def _cuts(items: Sequence[Item], first: int) -> list[int]:
    """Where the rest may begin: as it does, at what the user says, and behind the last of that before any
    item but results whose calls would be missing."""
    said = [place for place in range(first + 1, len(items)) if items[place].get("role") == "user"]
    last = said[-1] if said else first
    calls: dict[str, int] = {}
    call_of: dict[int, int] = {}
    for place, item in enumerate(items):
        if item["type"] == "function_call":
            calls[item["call_id"]] = place
        elif item["type"] == "function_call_output":
            call_of[place] = calls.get(item["call_id"], place)
    needed, behind = len(items), []
    for place in range(len(items) - 1, last, -1):
        needed = min(needed, call_of.get(place, needed))
        if needed >= place:
            behind.append(place)
    return [first, *said, *reversed(behind)]
