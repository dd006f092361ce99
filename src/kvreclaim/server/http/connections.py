"""Limits per connection (count, header size, read time), enforced before a request exists; refusals are
counted, some logged."""

from __future__ import annotations

import asyncio
import logging
import resource
import time
from asyncio import TimerHandle
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from ipaddress import IPv6Address, ip_address
from typing import Any

import httptools
import uvicorn
from pydantic_core import to_json
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError, error_body

logger = logging.getLogger("kvreclaim.server.http.refusals")

LINE_S = 10.0
"""Least seconds between two lines about the same status, so that clients cannot fill the log."""
MAX_HEAD_BYTES = 64 << 10
"""Limit of request line and headers, and of the framing of chunked bodies."""
MAX_HEADERS = 256
PATIENCE_S = 1.0
"""Seconds that a connection always has for a whole request, even when the server is full."""
LINGER_S = 5.0
"""Seconds for which the rest of a refused body is read and dropped, so that the client gets the answer."""
OTHER_FILES = 256


class Refusals:
    """Counts refusals by status, and logs them at a limited rate.

    count: adds one to the metrics
    """

    def __init__(self, count: Callable[[int], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._count = count
        self._clock = clock
        self._logged_s: dict[int, float] = {}
        self._unlogged: Counter[int] = Counter()

    def note(self, status: int, client: str) -> None:
        """client: its address or network"""
        self._count(status)
        now, logged_s = self._clock(), self._logged_s.get(status)
        if logged_s is not None and now < logged_s + LINE_S:
            self._unlogged[status] += 1
            return
        self._logged_s[status] = now
        fields = {"status": status, "client": client, "unlogged": self._unlogged.pop(status, 0)}
        logger.warning("a connection was refused: %d", status, extra={"fields": fields})


@dataclass(slots=True)
class Address:
    """Connections of one client. waiting: those without a whole request and the time since, oldest first."""

    num_open: int = 0
    waiting: dict[HTTPProtocol, float] = field(default_factory=dict)


class Connections:
    """All connections of a server. When it is full, a connection that has long sent no whole request is
    closed to make room: the same client's, or that of the client with the most of these. So idle clients
    cannot lock out others, and bursts are refused at no cost."""

    def __init__(self, config: ServerConfig, refusals: Refusals) -> None:
        self.config = config
        self.refusals = refusals
        self.num_open = 0
        self.addresses: dict[str, Address] = {}

    def admit(self, connection: HTTPProtocol) -> bool:
        """Register the connection; return False if there is no room."""
        client = connection.client_network
        own = self.addresses.get(client) or Address()
        crowded = None
        if own.num_open >= self.config.max_connections_per_address:
            crowded = own
        elif self.num_open >= self.config.max_connections:
            crowded = max(self.addresses.values(), key=lambda address: len(address.waiting))
        if crowded is not None:
            oldest, since = next(iter(crowded.waiting.items()), (None, 0.0))
            if oldest is None or connection.loop.time() - since < PATIENCE_S:
                return False
            oldest.give_up()
        self.addresses[client] = own
        self.num_open += 1
        own.num_open += 1
        own.waiting[connection] = connection.loop.time()
        return True

    def leave(self, connection: HTTPProtocol) -> None:
        own = self.addresses[connection.client_network]
        self.num_open -= 1
        own.num_open -= 1
        own.waiting.pop(connection, None)
        if not own.num_open:
            del self.addresses[connection.client_network]

    def set_waiting(self, connection: HTTPProtocol, waits: bool) -> None:
        """Record whether the connection still has to send a whole request."""
        waiting = self.addresses[connection.client_network].waiting
        waiting.pop(connection, None)
        if waits:
            waiting[connection] = connection.loop.time()


class HTTPConfig(uvicorn.Config):
    """uvicorn's config, with state shared by all connections."""

    def __init__(self, app: Any, limits: ServerConfig, refusals: Refusals) -> None:
        super().__init__(
            app,
            http=HTTPProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=limits.keep_alive_timeout_s,
        )
        self.shared = Connections(limits, refusals)


class HTTPProtocol(HttpToolsProtocol):
    """uvicorn's C parser, with the limits that it lacks.

    Bytes are counted until an element is complete: the head, a chunk of the body, the message.
    """

    config: HTTPConfig

    def __init__(self, config: HTTPConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.shared = config.shared
        self.client_network = ""
        self._admitted = False
        self._refused = False
        self._in_body = False
        self._pending_bytes = 0
        self._timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.client_network = network_of(self.client[0] if self.client else "")
        self._admitted = self.shared.admit(self)
        if self._admitted:
            self._within(self.shared.config.headers_timeout_s, self._too_slow)
        else:
            self._refuse(
                503, "too many connections are open; close some, or try later (see --max-connections)."
            )

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def give_up(self) -> None:
        self._refused = True
        self._forget()
        self.transport.close()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._pending_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # upgrades are not supported: the request is answered as HTTP
        except httptools.HttpParserError:  # uvicorn would log a line for each
            self._refuse(400, "this is no HTTP/1.1 request; check the client (for TLS, use a proxy).")
        if self._pending_bytes > MAX_HEAD_BYTES:
            self._refuse_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_body:  # trailers of a chunked body are ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._refused:
            return
        if self._pending_bytes > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
            # The bytes may belong to a body that came with the head.
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > MAX_HEAD_BYTES or len(self.headers) > MAX_HEADERS:
                self._refuse_head()
                return
        self._pending_bytes = 0
        self._in_body = True
        self._within(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_chunk_complete(self) -> None:
        self._pending_bytes = 0

    def on_message_complete(self) -> None:
        self._pending_bytes = 0
        self._in_body = False
        if self._refused:
            return
        super().on_message_complete()
        if self.cycle.response_complete:
            self._await_next()
        else:
            self.shared.set_waiting(self, False)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._refused or self.transport.is_closing() or not self.cycle.response_complete:
            return
        self.shared.set_waiting(self, True)
        if self._in_body:
            self._within(LINGER_S, self.give_up)
        else:
            self._await_next()

    def _await_next(self) -> None:
        """Restart the deadline, which uvicorn has for idle connections but not for slow heads."""
        self._within(self.timeout_keep_alive + self.shared.config.headers_timeout_s, self._too_slow)

    def _within(self, seconds: float | None, otherwise: Callable[[], None] | None = None) -> None:
        """Set the connection's only deadline; None clears it."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None and otherwise is not None:
            self._timer = self.loop.call_later(seconds, otherwise)

    def _too_slow(self) -> None:
        if self._pending_bytes:
            limit_s = self.shared.config.headers_timeout_s
            self._refuse(408, f"the request's headers have not come within {limit_s:g} s; send them faster.")
        else:
            self.give_up()

    def _refuse_head(self) -> None:
        self._refuse(
            431,
            f"request line and headers exceed {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers; send less.",
        )

    def _refuse(self, status: int, message: str) -> None:
        """Answer a request that was never complete, unless it was answered already, and close."""
        if self._refused:
            return
        if self._answered:
            self.give_up()
            return
        self.shared.refusals.note(status, self.client_network)
        body = to_json(error_body(ApiError(status, message), "", ""))
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(
            body
        )
        self.transport.write(STATUS_LINE[status] + head + body)
        self.give_up()

    @property
    def _answered(self) -> bool:
        """Whether the data being read belongs to a request with a started answer, or precedes one."""
        cycle = self.cycle
        begun = cycle is not None and cycle.response_started
        return begun and (self._in_body or not cycle.response_complete)

    def _forget(self) -> None:
        self._within(None)
        if self._admitted:
            self._admitted = False
            self.shared.leave(self)


def network_of(address: str) -> str:
    """Return the network of an address: /64 for IPv6 clients."""
    if ":" not in address:
        return address
    parsed = ip_address(address.partition("%")[0])
    assert isinstance(parsed, IPv6Address), address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(IPv6Address(int(parsed) >> 64 << 64))


def allow_files(num_connections: int) -> bool:
    """Raise the limit of open files for that many connections; False if the system allows fewer."""
    required = num_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= required:
        return True
    given = required if hard == resource.RLIM_INFINITY else min(required, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (given, hard))
    return given >= required
