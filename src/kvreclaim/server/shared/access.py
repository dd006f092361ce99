"""Facts about a finished HTTP request, for the log, the metrics and the trace, and the counts of all."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.engine.serving.client import RequestStream
from kvreclaim.server.shared.service import Service

CLIENT_LEFT = 499
"""Status of an answer after the client disconnected (nginx's number; never sent)."""

MAX_PATH = 256
"""Most characters of a path in logs and spans."""
METHODS = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"))


@dataclass(slots=True)
class Access:
    """One HTTP request and its answer.

    path:      its first MAX_PATH characters
    admitted:  whether the gate admitted it: its key, if one is required, was valid
    route:     the path as declared; "unmatched" if there is none
    status:    CLIENT_LEFT if the client closed its connection before the end
    tenant:    digest of the API key; model, user: as in the request
    streams:   requests to the engine; their figures are final unless they were aborted just now
    """

    method: str
    path: str
    route: str
    status: int
    request_id: str
    started_ns: int
    elapsed_s: float
    traceparent: dict[str, str]
    admitted: bool = True
    tenant: str | None = None
    model: str | None = None
    user: str | None = None
    streams: Sequence[RequestStream] = ()
    metrics: list[RequestMetrics] = field(init=False)

    def __post_init__(self) -> None:
        self.metrics = [stream.metrics for stream in self.streams]

    def total(self, figure: str) -> int:
        """Sum a figure of RequestMetrics over all prompts of the request."""
        return sum(getattr(metrics, figure) for metrics in self.metrics)

    def first(self, figure: str) -> float | None:
        """Return the smallest known value: for a time, the first occurrence."""
        found = [getattr(metrics, figure) for metrics in self.metrics]
        return min((value for value in found if value is not None), default=None)

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of all outputs; those running when the client left are being aborted."""
        return [
            stream.finish_reasons.get(index, "abort")
            for stream in self.streams
            for index in range(stream.new.params.n)
        ]


Watcher = Callable[[Access], None]


class Watch:
    """ASGI middleware around everything else; calls the watchers after every HTTP request."""

    def __init__(self, app: ASGIApp, service: Service, watchers: Sequence[Watcher]) -> None:
        self.app = app
        self.service = service
        self.watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        started, started_ns = time.perf_counter(), time.time_ns()
        status, complete = CLIENT_LEFT, False

        async def send_noting(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self.app(scope, receive, send_noting)
        except Exception:
            status, complete = 500, True  # answered by ServerErrorMiddleware, outside of this one
            raise
        finally:
            elapsed_s = time.perf_counter() - started
            self._notify(scope, status if complete else CLIENT_LEFT, started_ns, elapsed_s)

    def _notify(self, scope: Scope, status: int, started_ns: int, elapsed_s: float) -> None:
        state: dict[str, Any] = scope.get("state", {})
        if "request_id" not in state:
            return  # a browser's preflight, answered before the gate
        tenant = state.get("tenant")
        access = Access(
            method=scope["method"] if scope["method"] in METHODS else "other",
            path=scope["path"][:MAX_PATH],
            route=getattr(scope.get("route"), "path", "unmatched"),
            status=status,
            request_id=state["request_id"],
            started_ns=started_ns,
            elapsed_s=elapsed_s,
            traceparent=_traceparent(scope),
            admitted=tenant is not None,
            tenant=tenant.name if tenant is not None else None,
            model=state.get("model"),
            user=state.get("user"),
            streams=self.service.streams_of.pop(state["request_id"], ()),
        )
        for watcher in self.watchers:
            watcher(access)


def _traceparent(scope: Scope) -> dict[str, str]:
    """Return the W3C headers with the caller's span."""
    names = (b"traceparent", b"tracestate")
    return {name.decode(): value.decode("latin-1") for name, value in scope["headers"] if name in names}


class HttpCounts:
    """Counts HTTP answers. by_status: answers by (route, method, status)."""

    def __init__(self) -> None:
        self.by_status: Counter[tuple[str, str, str]] = Counter()

    def __call__(self, access: Access) -> None:
        self.by_status[access.route, access.method, str(access.status)] += 1

    def refused(self, status: int) -> None:
        self.by_status["unmatched", "other", str(status)] += 1

    def by_class(self) -> Counter[tuple[str, str, str]]:
        """Counts by class of status: 2xx, 4xx, ..."""
        found: Counter[tuple[str, str, str]] = Counter()
        for (route, method, status), count in self.by_status.items():
            found[route, method, f"{status[0]}xx"] += count
        return found
