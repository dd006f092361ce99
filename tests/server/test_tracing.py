"""Spans, as a collector gets them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx2
import pytest
import web
from collecting import Collector, collector, named
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes, http_attributes, url_attributes
from opentelemetry.semconv.attributes import error_attributes
from running import MODEL, Running, running_server

from kvreclaim import LLM, demo_model
from kvreclaim.engine.sampling.detokenizer import Detokenizer
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.admin.tracing import traces_url
from kvreclaim.server.base.config import ServerConfig

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
MARKER = "xyzzymarker"


def traced(ask: Callable[[Running], Any], **config: Any) -> tuple[Any, Collector]:
    """Return the value of `ask`, and the collector once the server has ended."""
    llm = LLM(demo_model(), num_blocks=128, max_num_seqs=4, max_model_len=256)
    with collector() as sink:
        options = {"otlp_traces_endpoint": sink.url, **config}
        with running_server(llm, **options) as server:
            found = ask(server)
        return found, sink


def post(server: Running, path: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return web.post(server.base_url + path, json={"model": MODEL, **body}, headers=headers)


def test_a_span_has_the_request_and_the_answer() -> None:
    prompt = " ".join(["GO", "wind", "oak", "fern"] * 12)
    body = {
        "prompt": prompt,
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 3,
        "ignore_eos": True,
    }

    def requests(server: Running) -> httpx2.Response:
        post(server, "/v1/completions", body)
        return post(server, "/v1/completions", {**body, "user": "user-7"}, traceparent=PARENT)

    answer, sink = traced(requests, trust_traceparent=True)
    assert set(sink.posts) == {("/v1/traces", "application/x-protobuf")}
    assert sink.resources[0]["service.name"] == "kvreclaim"
    first, span = sink.spans
    attrs, usage = named(span.attributes), answer.json()["usage"]
    latencies = {name: attrs.pop(name) for name in list(attrs) if name.startswith("gen_ai.latency.")}
    assert attrs == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "url.path": "/v1/completions",
        "http.response.status_code": 200,
        "enduser.pseudo.id": "user-7",
        "gen_ai.request.id": answer.headers["x-request-id"],
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvreclaim",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 3,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "kvreclaim.tokens_evicted": 0,
        "kvreclaim.blocks_freed": 0,
        "kvreclaim.blocks_peak": usage["kv_cache"]["peak_blocks"],
        "kvreclaim.compactions": 0,
        "kvreclaim.preemptions": 0,
    }
    assert attrs["gen_ai.usage.cache_read.input_tokens"] > 0
    assert latencies.keys() == {
        f"gen_ai.latency.{name}"
        for name in (
            *("time_in_queue", "time_to_first_token", "e2e", "time_in_model_prefill"),
            *("time_in_model_decode", "time_in_model_inference"),
        )
    }
    of = {name.rpartition(".")[2]: value for name, value in latencies.items()}
    elapsed_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < of["time_in_queue"] < of["time_to_first_token"] < of["e2e"] <= elapsed_s
    assert of["time_in_model_inference"] == pytest.approx(of["e2e"] - of["time_in_queue"])
    assert of["time_in_model_inference"] == pytest.approx(
        of["time_in_model_prefill"] + of["time_in_model_decode"]
    )
    assert span.name == f"text_completion {MODEL}"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert first.trace_id != span.trace_id
    assert not first.parent_span_id


@pytest.mark.parametrize(
    ("path", "body", "operation"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "GO wind"}]}, "chat"),
        ("/v1/messages", {"messages": [{"role": "user", "content": "GO wind"}]}, "chat"),
        ("/v1/completions", {"prompt": "GO wind"}, "text_completion"),
    ],
)
def test_every_dialect_and_streams(path: str, body: dict[str, Any], operation: str) -> None:
    body = {**body, "max_tokens": 3}
    ask = lambda server: [post(server, path, {**body, "stream": stream}) for stream in (False, True)]  # noqa: E731
    (whole, streamed), sink = traced(ask)
    assert [span.name for span in sink.spans] == [f"{operation} {MODEL}"] * 2
    ids = [named(span.attributes)["gen_ai.response.id"] for span in sink.spans]
    assert ids[0] == whole.json()["id"]
    first = next(line for line in streamed.text.splitlines() if line.startswith("data: "))
    event = json.loads(first.removeprefix("data: "))
    assert ids[1] == event.get("message", event)["id"]


def test_what_compression_did() -> None:
    policy = {"policy": "knorm", "budget": 32, "interval": 16, "recent": 8}
    prompt = " ".join(["GO", "wind", "oak", "fern"] * 25)
    body = {"prompt": prompt, "max_tokens": 60, "ignore_eos": True, "kv_compression": policy}
    answer, sink = traced(lambda server: post(server, "/v1/completions", body))
    attrs, usage = named(sink.spans[0].attributes), answer.json()["usage"]["kv_cache"]
    assert attrs["kvreclaim.blocks_freed"] == usage["blocks_freed"] > 0
    assert attrs["kvreclaim.tokens_evicted"] == usage["tokens_evicted"] > 0
    assert attrs["kvreclaim.compactions"] > 0


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> Any:
        raise ValueError(MARKER)

    def ask(server: Running) -> list[int]:
        refused = post(server, "/v1/completions", {"prompt": MARKER, "max_tokens": -1})
        monkeypatch.setattr(Detokenizer, "append", failing)
        return [refused.status_code, post(server, "/v1/completions", {"prompt": MARKER}).status_code]

    statuses, sink = traced(ask)
    assert statuses == [400, 500]
    assert [named(span.attributes)["error.type"] for span in sink.spans] == ["400", "500"]
    assert [span.status.code for span in sink.spans] == [Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR]
    assert named(sink.spans[1].attributes)["gen_ai.response.finish_reasons"] == ["error"]
    assert MARKER not in str(sink.spans)


def test_what_is_not_traced() -> None:
    """Machines' questions, and requests whose caller's trace is not sampled."""

    def ask(server: Running) -> None:
        for path in ("/health", "/metrics", "/load"):
            web.get(server.base_url + path)
        post(server, "/v1/completions", {"prompt": "GO"}, traceparent=UNSAMPLED)
        web.get(f"{server.base_url}/v1/models", headers={"traceparent": "nonsense"})

    _, sink = traced(ask, trust_traceparent=True)
    assert [span.name for span in sink.spans] == ["GET /v1/models"]


def test_a_client_does_not_decide_what_is_traced_unless_it_is_trusted() -> None:
    """The span that it names is a link of a trace of our own, whatever its sampling flag."""

    def ask(server: Running) -> None:
        for parent in (PARENT, UNSAMPLED):
            post(server, "/v1/completions", {"prompt": "GO", "max_tokens": 1}, traceparent=parent)

    _, sink = traced(ask)
    assert len(sink.spans) == 2
    for span, parent in zip(sink.spans, (PARENT, UNSAMPLED), strict=True):
        (link,) = span.links
        assert (link.trace_id.hex(), link.span_id.hex()) == tuple(parent.split("-")[1:3])
        assert span.trace_id != link.trace_id
        assert not span.parent_span_id


def test_who_has_no_key_makes_no_spans() -> None:
    def ask(server: Running) -> None:
        for key in ("wrong", "right"):
            web.get(f"{server.base_url}/v1/{'x' * 3000}", headers={"x-api-key": key})

    _, sink = traced(ask, api_keys=("right",))
    (span,) = sink.spans
    assert len(named(span.attributes)["url.path"]) == 256


def test_a_collector_that_is_not_there_harms_no_request() -> None:
    answer, sink = traced(
        lambda server: post(server, "/v1/completions", {"prompt": "GO", "max_tokens": 2}),
        otlp_traces_endpoint="http://127.0.0.1:1",
    )
    assert answer.status_code == 200
    assert not sink.spans


def test_names_are_the_conventions() -> None:
    """OpenTelemetry's own list; the latencies are not in it and are called as in vLLM."""
    known = {
        value
        for module in (gen_ai_attributes, http_attributes, url_attributes, error_attributes)
        for value in vars(module).values()
        if isinstance(value, str)
    }
    body = {"prompt": "GO", "max_tokens": 2}
    _, sink = traced(lambda server: post(server, "/v1/completions", body))
    ours = {name for name in named(sink.spans[0].attributes) if not name.startswith("kvreclaim.")}
    beyond = {name for name in ours - known if not name.startswith("gen_ai.latency.")}
    assert beyond == {"gen_ai.request.id"}


def test_nothing_is_loaded_without_the_option() -> None:
    code = (
        "import sys; import kvreclaim.server.entry.run; "
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk') or 'tracing' in name])"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "kvreclaim.server.admin.tracing" not in found.stdout
    assert "opentelemetry.sdk" not in found.stdout


def test_endpoints() -> None:
    assert traces_url("http://a:4318") == traces_url("http://a:4318/") == "http://a:4318/v1/traces"
    assert traces_url("https://a/tenant/spans?x=1") == "https://a/tenant/spans?x=1"
    for wrong in ("a:4318", "grpc://a:4317", "http://"):
        with pytest.raises(InvalidArgumentError, match="otlp_traces_endpoint is"):
            ServerConfig(served_model_name=("m",), otlp_traces_endpoint=wrong)
