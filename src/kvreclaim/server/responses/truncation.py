"""`truncation: "auto"`: the items of a conversation that fit into the context."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence

from kvreclaim.engine.api.chat import SYSTEM_ROLES
from kvreclaim.server.responses.items import Item


def fitting(items: Sequence[Item], fits: Callable[[list[int]], bool | None]) -> list[int]:
    """Return the indices of the items that stay: leading system and developer items, and the latest others
    that fit; if none do, the fewest that can be rendered.

    fits: whether the items at these indices fit, None if they cannot be rendered; monotonic in their number
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
    """Possible starts of the rest: unchanged, at each user message, and after the last of these before any
    item except results with a missing call."""
    user_turns = [place for place in range(first + 1, len(items)) if items[place].get("role") == "user"]
    last = user_turns[-1] if user_turns else first
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
    return [first, *user_turns, *reversed(behind)]
