"""The address of the page, by the operator's `page_port` and `page_host` in kv_compression."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError

FIELDS = ("page_port", "page_host")
LOOPBACK = "127.0.0.1"
MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class PageAddress:
    """port: 0 is any that is free; with data parallelism each rank adds its own number."""

    port: int
    host: str = LOOPBACK

    @classmethod
    def read(cls, given: Mapping[str, object], where: str) -> PageAddress | None:
        """Read the operator's object; None without a configured page. Raises: InvalidArgumentError."""
        port, host = given.get("page_port"), given.get("page_host")
        require(
            port is not None or host is None,
            f"page_host in {where} is {host!r}, but no page_port is named; name one, or leave page_host out.",
        )
        if port is None:
            return None
        if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= MAX_PORT:
            raise InvalidArgumentError(
                f"page_port in {where} is {port!r}; it must be 1 to {MAX_PORT}, or 0 for any free port."
            )
        if host is not None and not (isinstance(host, str) and host):
            raise InvalidArgumentError(
                f"page_host in {where} is {host!r}; it must be a name or an address of this machine, such as "
                f"{LOOPBACK!r}."
            )
        return cls(port, LOOPBACK if host is None else host)

    def of_rank(self, rank: int) -> PageAddress:
        """The address of a data-parallel engine. Raises: InvalidArgumentError where that is no port any
        more."""
        port = self.port + rank if self.port else 0
        require(
            port <= MAX_PORT,
            f"page_port is {self.port}, and the engine of data-parallel rank {rank} would need port {port}; "
            f"name one that is at most {MAX_PORT} with the rank added.",
        )
        return PageAddress(port, self.host)


def as_json(address: PageAddress | None) -> dict[str, Any]:
    """JSON from which `read` makes an equal address."""
    return {} if address is None else {"page_port": address.port, "page_host": address.host}
