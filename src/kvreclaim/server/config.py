"""What `kvreclaim serve` may be told, besides the engine's own options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvreclaim.checks import require
from kvreclaim.options import check_options, option
from kvreclaim.server.tool_calls import PARSERS

MAX_INT32 = (1 << 31) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's limits and names. Raises: InvalidArgumentError.

    served_model_name: names under which the model answers, each time with the one it was asked for; metrics
                       have the first
    api_keys:          keys that are accepted, one per tenant; none: everybody, as one tenant
    operator_key:      None: the only API key, or everybody without keys
    chat_template:     Jinja text instead of the tokenizer's own
    tool_call_parser:  a name in server/tool_calls.py; None: answers are all text
    """

    served_model_name: tuple[str, ...] = option((), "Names in the API; the model's own.", typed_as=list[str])
    host: str = option("127.0.0.1", "Address to listen on.")
    port: int = option(8000, "Port; 0 takes a free one.", low=0)
    api_keys: tuple[str, ...] = option(
        (), "One per tenant.", flags=("--api-key",), env="KVRECLAIM_API_KEY", typed_as=list[str]
    )
    operator_key: str | None = option(
        None, "May read metrics, load and the page, too.", env="KVRECLAIM_OPERATOR_KEY"
    )
    tenant_secret: str | None = option(
        None,
        "Makes the names of tenants in logs from their keys; at random at each start where not said.",
        env="KVRECLAIM_TENANT_SECRET",
    )
    allowed_hosts: tuple[str, ...] = option(
        (), "Host headers to accept, * for all; without keys own names and addresses.", typed_as=list[str]
    )
    max_body_bytes: int | None = option(
        None, "Larger bodies are refused unread; by the model's length where not said.", low=1024
    )
    body_timeout_s: float = option(
        60.0, "Seconds for a body to come.", low=0.1, high=86_400.0, flags=("--body-timeout",)
    )
    headers_timeout_s: float = option(
        10.0, "Seconds for a request's headers to come.", low=0.1, high=86_400.0, flags=("--headers-timeout",)
    )
    keep_alive_timeout_s: int = option(
        5, "Seconds that a connection may be idle.", low=1, flags=("--keep-alive-timeout",)
    )
    max_connections: int = option(1024, "Open connections.", low=1)
    max_connections_per_address: int = option(128, "Open connections of one client; a proxy is one.", low=1)
    max_n: int = option(64, "Outputs per request.", low=1)
    max_queue_len: int = option(1024, "Waiting requests; more get a 429.", low=1)
    max_outputs_per_request: int = option(1024, "Prompts times n of one request.", low=1)
    max_logprobs_per_request: int = option(
        1 << 16,
        "Log-probabilities of one answer: tokens times (logprobs + 1), of prompts and outputs.",
        low=1,
    )
    max_concurrent_requests_per_key: int | None = option(
        None, "POST requests of one API key at once; more get a 429.", low=1
    )
    max_concurrent_outputs_per_key: int | None = option(
        None,
        "Prompts times n of one API key that wait or run; half of --max-queue-len where not said and there "
        "are several keys.",
        low=1,
    )
    min_priority: int = option(
        0,
        "Least, so most urgent, priority that a request may ask for; the operator's may ask for any.",
        low=-MAX_INT32 - 1,
        high=MAX_INT32,
    )
    client_kv_compression: bool = option(True, "Requests may say kv_compression.")
    min_kv_compression_interval: int = option(16, "Tokens that a request may ask for.", low=1)
    max_kv_budget: int | None = option(None, "Tokens that a request may ask for.", low=1)
    max_kv_query_window: int = option(64, "Queries that a request's policy may look back on.", low=0)
    default_max_tokens: int = option(16, "Of a completion that names no limit.", low=1)
    slot_save_path: str | None = option(
        None,
        "Directory in which clients may save sessions (POST /slots/NAME?action=save), a folder for each key.",
    )
    max_saved_slots: int = option(64, "Sessions that one key may have saved.", low=1)
    shutdown_timeout_s: float = option(
        30.0,
        "Seconds for running requests after SIGTERM.",
        low=0.0,
        high=86_400.0,
        flags=("--shutdown-timeout",),
    )
    allow_special_tokens_in_text: bool = option(
        False, "What spells a control token in messages, tools and template variables is one."
    )
    chat_template: str | None = option(None, "Jinja file instead of the model's own.", typed_as=Path)
    tool_call_parser: str | None = option(
        None, "How the model writes tool calls: hermes.", choices=tuple(PARSERS)
    )
    engine_process: bool = option(True, "The engine in a process of its own; else in a thread.")
    log_prompts: bool = option(False, "Prompts and answers too.")
    otlp_traces_endpoint: str | None = option(None, "Where spans are sent, OTLP over HTTP.")
    trust_traceparent: bool = option(
        False, "Clients' traceparent is the parent of spans and says whether they are sent; else a link."
    )

    def __post_init__(self) -> None:
        check_options(self)
        require(bool(self.served_model_name), "served_model_name is empty; pass at least one name.")
        require(self.port < 65_536, f"port is {self.port}; ports end at 65535; pass a smaller one.")
        if self.otlp_traces_endpoint is not None:
            check_url("otlp_traces_endpoint", self.otlp_traces_endpoint)
        keys = (*self.api_keys, *([self.operator_key] if self.operator_key is not None else []))
        require(all(keys), "an API key is empty; pass a non-empty key, or none at all.")
        require(
            all(key.isascii() for key in keys),
            "an API key holds a character beyond ASCII, which HTTP headers do not carry; choose another key.",
        )
        require(len(set(self.api_keys)) == len(self.api_keys), "an API key is named twice; name each once.")


def check_url(name: str, value: str) -> None:
    """Raises InvalidArgumentError unless value is an http or https URL."""
    parts = urlsplit(value)
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname),
        f"{name} is {value!r}; pass a URL such as http://127.0.0.1:4318/v1/traces.",
    )
