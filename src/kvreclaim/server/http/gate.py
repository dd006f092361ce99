"""The gate of every HTTP request: an id, the key, the limits. Plain ASGI, so streams flow through."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvreclaim.page.hosts import host_of, is_foreign, is_own
from kvreclaim.server.base.config import ServerConfig
from kvreclaim.server.base.errors import ApiError, error_body, failed
from kvreclaim.server.base.identity import Tenant, Tenants, new_request_id

logger = logging.getLogger(__name__)

OPEN_PATHS = ("/health",)
OPERATOR_PATHS = (
    *("/", "/metrics", "/load", "/page", "/openapi.json"),
    *("/kv_offload/status", "/reset_prefix_cache"),
)
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
EVERY = "*"
MAX_BODY_BYTES = 16 << 20
MAX_DIGITS = 18
"""Most digits of a length; Python refuses to parse thousands of digits."""


class Hosts:
    """Host names by which the server may be addressed: checked if the operator lists them or no key is
    required.

    A foreign site can resolve its own name to this server's address and read the answers through the browser
    (DNS rebinding), but it cannot change the Host header.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._is_explicit = bool(config.allowed_hosts)
        self._all = EVERY in config.allowed_hosts or (not self._is_explicit and bool(config.api_keys))
        own = config.allowed_hosts or ("localhost", socket.gethostname(), config.host)
        self._names = frozenset(name.lower() for name in own)

    def allows(self, header: str | None) -> bool:
        """header: Host; None, which browsers never send, is allowed."""
        if self._all or header is None:
            return True
        return host_of(header) in self._names if self._is_explicit else is_own(header, self._names)


def guard(app: Starlette, config: ServerConfig, max_body_bytes: int) -> None:
    """Put the gate around an app, and CORS around the gate where other origins are allowed."""
    app.add_middleware(Gate, config=config, max_body_bytes=max_body_bytes)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )


async def read_body(request: Request, limit_s: float) -> bytes:
    """Raises: ApiError 408; ClientDisconnect."""
    try:
        async with asyncio.timeout(limit_s):
            return await request.body()
    except TimeoutError:
        raise ApiError(
            408,
            f"the body has not come within {limit_s:g} s; send it faster.",
            headers={"connection": "close"},
        ) from None


class Gate:
    """Refuses invalid requests and puts `request_id` and `tenant` into the scope's state."""

    def __init__(self, app: ASGIApp, config: ServerConfig, max_body_bytes: int) -> None:
        self.app = app
        self.config = config
        self.max_body_bytes = max_body_bytes
        self.tenants = Tenants(config)
        self.hosts = Hosts(config)
        self.running: Counter[str | None] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = new_request_id()
        scope.setdefault("state", {})["request_id"] = request_id

        begun = False

        async def send_with_id(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                headers.setdefault("x-request-id", request_id)
                headers.setdefault("request-id", request_id)
            await send(message)

        try:
            await self._pass(scope, receive, send_with_id)
        except ApiError as error:
            await self._refuse(error, scope, receive, send_with_id)
        except Exception as error:
            logger.error("request %s failed", request_id, exc_info=error)
            if begun:
                raise  # the client sees a broken connection
            await self._refuse(failed(request_id), scope, receive, send_with_id)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._admit(scope)
        scope["state"]["tenant"] = tenant
        counted = scope["method"] == "POST"
        self.running[tenant.name] += counted
        try:
            # The server sends no body for HEAD.
            seen = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await self.app(seen, _Limited(receive, self.max_body_bytes), send)
            if "route" in seen:
                scope["route"] = seen["route"]
        finally:
            self.running[tenant.name] -= counted
            if not self.running[tenant.name]:
                del self.running[tenant.name]

    def _admit(self, scope: Scope) -> Tenant:
        path, headers = scope["path"], Headers(scope=scope)
        if not self.hosts.allows(headers.get("host")):
            raise ApiError(
                403,
                "the Host header names no host of this server; call it by its address or name, or allow this "
                "one (--allowed-hosts).",
                code="host_not_allowed",
            )
        known = {EVERY, headers.get("origin")} & set(self.config.allowed_origins)
        if (
            scope["method"] not in SAFE_METHODS
            and not (known or _is_preflighted(headers))
            and is_foreign(headers)
        ):
            raise ApiError(
                403,
                "a page of another site sent this request (Sec-Fetch-Site, Origin); send it from this "
                "server's own page, or from a program, without these headers.",
                code="cross_site",
            )
        tenant = self.tenants.of(headers)
        if tenant is None:
            if path in OPEN_PATHS:
                return Tenant(None, operator=False)
            message = (
                "the API key is missing or unknown; send it as `Authorization: Bearer KEY` or `x-api-key`."
            )
            challenge = {"www-authenticate": 'Basic realm="kvreclaim", Bearer realm="kvreclaim"'}
            raise ApiError(401, message, code="invalid_api_key", headers=challenge)
        if _is_operators(path) and not tenant.operator:
            challenge = {"www-authenticate": 'Basic realm="kvreclaim operator", Bearer realm="kvreclaim"'}
            raise ApiError(
                401,
                f"{path} concerns all tenants; send the operator key (--operator-key).",
                code="operator_only",
                headers=challenge,
            )
        length = headers.get("content-length", "0")
        if length.isdecimal() and (len(length) > MAX_DIGITS or int(length) > self.max_body_bytes):
            raise ApiError(413, _too_large(self.max_body_bytes))
        limit = self.config.max_concurrent_requests_per_key
        if limit is not None and scope["method"] == "POST" and self.running[tenant.name] >= limit:
            raise ApiError(
                429,
                f"{self.running[tenant.name]} requests of this key are running, the limit is {limit}; "
                "try again when one has ended.",
                code="rate_limit_exceeded",
                headers={"retry-after": "1"},
            )
        return tenant

    async def _refuse(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        body = error_body(error, scope["path"], scope["state"]["request_id"])
        await JSONResponse(body, error.status, headers=error.headers)(scope, receive, send)


class _Limited:
    """A receive channel that limits the actual bytes of a body, regardless of the headers."""

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive = receive
        self._limit = limit
        self._seen = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.request":
            self._seen += len(message.get("body", b""))
            if self._seen > self._limit:
                raise ApiError(413, _too_large(self._limit))
        return message


def _too_large(limit: int) -> str:
    return f"the body exceeds {limit} bytes; send a smaller one."


def _is_preflighted(headers: Headers) -> bool:
    """Whether a browser sends a preflight, which this server refuses but for --allowed-origins, before such a
    cross-site request: it has a JSON body, or a key in a custom header."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    is_json = kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json"))
    bearer = headers.get("authorization", "").lower().startswith("bearer ")
    return is_json or bearer or "x-api-key" in headers


def _is_operators(path: str) -> bool:
    return path in OPERATOR_PATHS or path.startswith("/page/")
