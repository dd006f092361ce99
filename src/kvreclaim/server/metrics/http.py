"""Counts the answers of the HTTP side, in the event loop."""

from __future__ import annotations

from collections import Counter

from kvreclaim.server.access import Access


class HttpCounts:
    """A watcher. by_status: answers by (route, method, status)."""

    def __init__(self) -> None:
        self.by_status: Counter[tuple[str, str, str]] = Counter()

    def __call__(self, access: Access) -> None:
        self.by_status[access.route, access.method, str(access.status)] += 1

    def refused(self, status: int) -> None:
        """A connection that never became a request."""
        self.by_status["unmatched", "other", str(status)] += 1

    def by_class(self) -> Counter[tuple[str, str, str]]:
        """The same by class of status: 2xx, 4xx, ..."""
        found: Counter[tuple[str, str, str]] = Counter()
        for (route, method, status), count in self.by_status.items():
            found[route, method, f"{status[0]}xx"] += count
        return found
