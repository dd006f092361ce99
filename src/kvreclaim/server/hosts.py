"""By what names a server may be called.

A page of a foreign site can have its own name resolved to this server's address, and then reads what the
server answers to the browser. It cannot have the browser send another name than its own.
"""

from __future__ import annotations

import socket
from ipaddress import ip_address

from kvreclaim.server.config import ServerConfig

EVERY = "*"


class Hosts:
    """Checked where the operator says which, and where nobody needs a key."""

    def __init__(self, config: ServerConfig) -> None:
        self._said = bool(config.allowed_hosts)
        self._all = EVERY in config.allowed_hosts or (not self._said and bool(config.api_keys))
        own = config.allowed_hosts or ("localhost", socket.gethostname(), config.host)
        self._names = {name.lower() for name in own}

    def allows(self, header: str | None) -> bool:
        """header: Host; None, which no browser sends, is allowed."""
        if self._all or header is None:
            return True
        name = host_of(header)
        return name in self._names or (not self._said and (is_address(name) or name.endswith(".localhost")))


def host_of(header: str) -> str:
    """Without the port, and without the brackets of an IPv6 address."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
