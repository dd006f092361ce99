"""OpenTelemetry: one span per API request, exported by OTLP over HTTP.

Imported only when tracing is enabled. Names follow OpenTelemetry's conventions for generative AI and HTTP;
the latencies (gen_ai.latency.*), which these lack, have vLLM's names.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, SpanKind, Status, StatusCode, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvreclaim import __version__
from kvreclaim.server.base.identity import answer_id
from kvreclaim.server.shared.access import Access

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
}
TRACED = ("/v1/", "/tokenize", "/detokenize")
DEFAULT_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 5


def traces_url(endpoint: str) -> str:
    """Return the URL for spans; adds OTLP's path if the endpoint has none."""
    parts = urlsplit(endpoint)
    return parts._replace(path=DEFAULT_PATH).geturl() if parts.path in ("", "/") else endpoint


class Tracing:
    """Makes a span of each API request that the gate admitted.

    trusting: the caller's span is the parent and its sampling decision is respected; otherwise it is a link
    """

    def __init__(self, endpoint: str, *, trusting: bool) -> None:
        self._trusting = trusting
        exporter = OTLPSpanExporter(traces_url(endpoint), timeout=EXPORT_TIMEOUT_S)
        own = Resource.create({"service.name": "kvreclaim", "service.version": __version__})
        named = OTELResourceDetector().detect()  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES come first
        self._provider = TracerProvider(resource=own.merge(named), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kvreclaim", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, access: Access) -> None:
        if not access.admitted or not access.path.startswith(TRACED):
            return
        caller = self._propagator.extract(access.traceparent, Context())
        named = get_current_span(caller).get_span_context()
        span = self._tracer.start_span(
            span_name(access),
            context=caller if self._trusting else Context(),
            links=[Link(named)] if named.is_valid and not self._trusting else [],
            kind=SpanKind.SERVER,
            start_time=access.started_ns,
            attributes=attributes(access),
        )
        if access.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        span.end(access.started_ns + round(access.elapsed_s * 1e9))

    def shutdown(self) -> None:
        """Export the remaining spans. Blocks until the export ends or times out."""
        self._provider.shutdown()


def span_name(access: Access) -> str:
    """`chat MODEL`, `text_completion MODEL`; `METHOD route` for routes that generate nothing."""
    operation = OPERATIONS.get(access.route)
    if operation is None or access.model is None:
        return f"{access.method} {access.route}"
    return f"{operation} {access.model}"


def attributes(access: Access) -> dict[str, Any]:
    """Attributes of the request's span. Contains no prompt or answer text."""
    found: dict[str, Any] = {
        "http.request.method": access.method,
        "http.route": access.route,
        "url.path": access.path,
        "http.response.status_code": access.status,
        "gen_ai.request.id": access.request_id,
    }
    if access.status >= 400:
        found["error.type"] = str(access.status)
    if access.user is not None:
        found["enduser.pseudo.id"] = access.user
    if access.route in OPERATIONS:
        found["gen_ai.operation.name"] = OPERATIONS[access.route]
        found["gen_ai.provider.name"] = "kvreclaim"
    if access.model is not None:
        found["gen_ai.request.model"] = access.model
    if access.streams:
        found |= _request_attributes(access) | _response_attributes(access) | _latencies(access)
    return found


def _request_attributes(access: Access) -> dict[str, Any]:
    """Parameters shared by every prompt of the request."""
    params = access.streams[0].new.params
    named = {
        "gen_ai.request.choice.count": params.n,
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k if params.top_k > 0 else None,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
    }
    return {name: value for name, value in named.items() if value is not None}


def _response_attributes(access: Access) -> dict[str, Any]:
    return {
        "gen_ai.response.id": answer_id(access.request_id, access.route),
        "gen_ai.response.model": access.model or "",
        "gen_ai.response.finish_reasons": access.finish_reasons,
        "gen_ai.usage.input_tokens": access.total("num_prompt_tokens"),
        "gen_ai.usage.output_tokens": access.total("num_generated_tokens"),
        "gen_ai.usage.cache_read.input_tokens": access.total("num_cached_tokens"),
        "kvreclaim.tokens_evicted": access.total("tokens_evicted"),
        "kvreclaim.blocks_freed": access.total("blocks_freed"),
        "kvreclaim.blocks_peak": max(metrics.peak_blocks for metrics in access.metrics),
        "kvreclaim.compactions": access.total("compactions"),
        "kvreclaim.preemptions": access.total("preemptions"),
    }


def _latencies(access: Access) -> dict[str, float]:
    """Latencies in seconds: the earliest over the prompts. Events that never happened are omitted."""
    queue, first, end = access.first("queue_s"), access.first("ttft_s"), access.first("e2e_s")
    found = {
        "gen_ai.latency.time_in_queue": queue,
        "gen_ai.latency.time_to_first_token": first,
        "gen_ai.latency.e2e": end,
    }
    if queue is not None and first is not None:
        found["gen_ai.latency.time_in_model_prefill"] = first - queue
        if end is not None:
            found["gen_ai.latency.time_in_model_decode"] = end - first
            found["gen_ai.latency.time_in_model_inference"] = end - queue
    return {name: value for name, value in found.items() if value is not None}
