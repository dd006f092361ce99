"""The server's listening socket, bound before the model is loaded."""

from __future__ import annotations

import os
import socket

from kvreclaim.errors import InvalidArgumentError

LISTEN_FD = "KVRECLAIM_LISTEN_FD"
"""Variable with the number of a listening socket that the parent process has bound."""


def bind(host: str, port: int) -> socket.socket:
    """Listen on an address; 0 takes a free port. Raises: InvalidArgumentError if it is unavailable."""
    if (inherited := os.environ.pop(LISTEN_FD, None)) is not None:
        return socket.socket(fileno=int(inherited))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        raise InvalidArgumentError(
            f"cannot listen on {host}:{port} ({reason}); choose another --host or --port (0: any free port)."
        ) from error


def address_of(listener: socket.socket) -> str:
    """Return the URL of a server on this socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
