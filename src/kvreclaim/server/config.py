"""What `kvreclaim serve` may be told, besides the engine's own options."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from kvreclaim.checks import check_bool, check_choice, check_int, check_number, require
from kvreclaim.server.tool_calls import PARSERS


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's limits and names.

    served_model_name: names under which the model answers, each time with the one it was asked for; metrics
                       have the first
    api_keys:          keys that are accepted, one per tenant; none: everybody, as one tenant
    operator_key:      may read metrics, load and the page; None: the only API key, or everybody without keys
    max_body_bytes:    larger requests are refused unread
    max_n:             outputs per request
    max_queue_len:     requests waiting for blocks; more get a 429
    max_concurrent_requests_per_key: of one API key at once; more get a 429; None: no limit
    min_kv_compression_interval, max_kv_budget, max_kv_query_window: bounds of what requests may ask with
                       kv_compression: interval and budget in tokens, queries that a policy looks back on
                       (snapkv's window); max_kv_budget None: no bound
    default_max_tokens: of a completion that names no limit (OpenAI's is 16)
    shutdown_timeout_s: what running requests have to finish after SIGTERM
    chat_template:     Jinja text instead of the tokenizer's own
    tool_call_parser:  how the model writes tool calls (server/tool_calls.py); None: its answers are all text
    log_prompts:       write prompts and answers into the log
    otlp_traces_endpoint: where OpenTelemetry spans are sent, OTLP over HTTP; None: none are made
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = ()
    operator_key: str | None = None
    max_body_bytes: int = 16 << 20
    max_n: int = 64
    max_queue_len: int = 1024
    max_concurrent_requests_per_key: int | None = None
    min_kv_compression_interval: int = 16
    max_kv_budget: int | None = None
    max_kv_query_window: int = 64
    default_max_tokens: int = 16
    shutdown_timeout_s: float = 30.0
    chat_template: str | None = None
    tool_call_parser: str | None = None
    log_prompts: bool = False
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        require(bool(self.served_model_name), "served_model_name is empty; pass at least one name.")
        check_int("port", self.port, 0)
        require(self.port < 65_536, f"port is {self.port}; ports end at 65535; pass a smaller one.")
        check_int("max_body_bytes", self.max_body_bytes, 1024)
        check_int("max_n", self.max_n, 1)
        check_int("max_queue_len", self.max_queue_len, 1)
        check_int("default_max_tokens", self.default_max_tokens, 1)
        check_int("min_kv_compression_interval", self.min_kv_compression_interval, 1)
        check_int("max_kv_query_window", self.max_kv_query_window, 0)
        if self.max_kv_budget is not None:
            check_int("max_kv_budget", self.max_kv_budget, 1)
        check_number("shutdown_timeout_s", self.shutdown_timeout_s, 0.0, 86_400.0)
        check_bool("log_prompts", self.log_prompts)
        if self.otlp_traces_endpoint is not None:
            check_url("otlp_traces_endpoint", self.otlp_traces_endpoint)
        if self.tool_call_parser is not None:
            check_choice("tool_call_parser", self.tool_call_parser, PARSERS)
        if self.max_concurrent_requests_per_key is not None:
            check_int("max_concurrent_requests_per_key", self.max_concurrent_requests_per_key, 1)
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
