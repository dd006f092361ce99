"""Routers: they choose a replica by loads as old as their last update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from types import MappingProxyType

from kvreclaim.checks import check_choice

FEW = 4
"""Requests by which the load of two replicas may differ before a prefix counts less than that."""
WORTH = 0.1
"""Share of a prompt that must be known to a replica for the prompt to go there."""


class Router(ABC):
    """loads: unfinished requests of each replica, as of the last look, and those sent since. The caller keeps
    them; blocks: that a replica has, in pieces of prompts."""

    def __init__(self, num_replicas: int, pieces_per_replica: int) -> None:
        self.loads = [0] * num_replicas

    @abstractmethod
    def choose(self, numbers: list[int]) -> int:
        """Choose a replica for a prompt. numbers: its pieces and its conversation (Links.walk)."""


class RoundRobin(Router):
    """Round robin."""

    def __init__(self, num_replicas: int, pieces_per_replica: int) -> None:
        super().__init__(num_replicas, pieces_per_replica)
        self._next = -1

    def choose(self, numbers: list[int]) -> int:
        self._next = (self._next + 1) % len(self.loads)
        return self._next


class LeastLoaded(Router):
    """The one with the fewest unfinished requests, the first of several."""

    def choose(self, numbers: list[int]) -> int:
        return self.loads.index(min(self.loads))


class PrefixAware(Router):
    """The one that was sent most of the prompt's beginning before, unless it has too much to do; else the
    least loaded. The router remembers what it has sent, as many pieces as a replica has room for; what a
    replica really holds it does not know."""

    def __init__(self, num_replicas: int, pieces_per_replica: int) -> None:
        super().__init__(num_replicas, pieces_per_replica)
        self._most = max(1, pieces_per_replica)
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]
        self._holders: dict[int, set[int]] = {}

    def choose(self, numbers: list[int]) -> int:
        least = min(self.loads)
        found = self._deepest(numbers, least)
        chosen = self.loads.index(least) if found is None else found
        self._note(chosen, numbers)
        return chosen

    def _deepest(self, numbers: list[int], least: int) -> int | None:
        depth, last = 0, None
        for number in numbers:
            holders = self._holders.get(number)
            both = holders if last is None else holders and last & holders
            if not both:
                break
            depth, last = depth + 1, both
        if not last or depth < WORTH * len(numbers):
            return None
        chosen = min(last, key=lambda replica: (self.loads[replica], replica))
        return chosen if self.loads[chosen] - least <= FEW else None

    def _note(self, replica: int, numbers: list[int]) -> None:
        sent = self._sent[replica]
        for number in numbers:
            if number in sent:
                sent.move_to_end(number)
            else:
                sent[number] = None
                self._holders.setdefault(number, set()).add(replica)
        while len(sent) > self._most:
            gone, _ = sent.popitem(last=False)
            self._holders[gone].discard(replica)
            if not self._holders[gone]:
                del self._holders[gone]


ROUTERS: Mapping[str, type[Router]] = MappingProxyType(
    {"rr": RoundRobin, "least": LeastLoaded, "prefix": PrefixAware}
)


def make_router(name: str, num_replicas: int, pieces_per_replica: int) -> Router:
    """Raises: InvalidArgumentError."""
    check_choice("router", name, tuple(ROUTERS))
    return ROUTERS[name](num_replicas, pieces_per_replica)
