"""By what names a server may be called.

A page of a foreign site can have its own name resolved to this server's address, and then reads what the
server answers to the browser. It cannot have the browser send another name than its own.
"""

from __future__ import annotations

import socket

from kvreclaim.page.hosts import host_of, is_own
from kvreclaim.server.config import ServerConfig

EVERY = "*"


class Hosts:
    """Checked where the operator says which, and where nobody needs a key."""

    def __init__(self, config: ServerConfig) -> None:
        self._said = bool(config.allowed_hosts)
        self._all = EVERY in config.allowed_hosts or (not self._said and bool(config.api_keys))
        own = config.allowed_hosts or ("localhost", socket.gethostname(), config.host)
        self._names = frozenset(name.lower() for name in own)

    def allows(self, header: str | None) -> bool:
        """header: Host; None, which no browser sends, is allowed."""
        if self._all or header is None:
            return True
        return host_of(header) in self._names if self._said else is_own(header, self._names)
