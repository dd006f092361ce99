"""Options of `kvreclaim serve` besides the engine's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvreclaim.checks import require
from kvreclaim.options import (
    CACHING,
    COMPRESSION,
    FIRST,
    LIMITS,
    MODEL,
    OBSERVABILITY,
    check_options,
    option,
)
from kvreclaim.parsers.formats import REASONING_PARSERS, TOOL_PARSERS

MAX_INT32 = (1 << 31) - 1
AUTO, NONE = "auto", "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The server's limits and names. Raises: InvalidArgumentError.

    served_model_name: names of the model; an answer has the name in its request, metrics have the first
    api_keys:          accepted keys, one per tenant; none: a single tenant
    operator_key:      None: the only API key is the operator's; without keys, every client is the operator
    chat_template:     Jinja text that replaces the tokenizer's own
    tool_call_parser, reasoning_parser: a name in parsers/formats.py; auto: derived from the chat template;
                       none: calls and reasoning stay text
    """

    served_model_name: tuple[str, ...] = option(
        (), "Model names in the API. Default: the model's own.", typed_as=list[str], panel=FIRST
    )
    host: str = option("127.0.0.1", "Address to listen on.", panel=FIRST)
    port: int = option(8000, "Port; 0 takes a free one.", low=0, panel=FIRST)
    api_keys: tuple[str, ...] = option(
        (),
        "Accepted API key; one per tenant. Default: none is needed.",
        flags=("--api-key",),
        env="KVRECLAIM_API_KEY",
        typed_as=list[str],
        panel=FIRST,
    )
    operator_key: str | None = option(
        None, "API key that may also read metrics, load and the page.", env="KVRECLAIM_OPERATOR_KEY"
    )
    tenant_secret: str | None = option(
        None,
        "Secret from which tenants' names in logs and caches are derived. Default: random at each start.",
        env="KVRECLAIM_TENANT_SECRET",
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host headers to accept; * accepts all. Default: with API keys all, without them own names and "
        "addresses.",
        typed_as=list[str],
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origin of web pages that may call this server, such as https://app.example; * allows all. Default: "
        "this server's own page.",
        typed_as=list[str],
    )
    max_body_bytes: int | None = option(
        None,
        "Maximum size of a request body. Default: what the model's context needs.",
        low=1024,
        panel=LIMITS,
    )
    body_timeout_s: float = option(
        60.0,
        "Seconds to wait for a request body.",
        low=0.1,
        high=86_400.0,
        flags=("--body-timeout",),
        panel=LIMITS,
    )
    headers_timeout_s: float = option(
        10.0,
        "Seconds to wait for a request's headers.",
        low=0.1,
        high=86_400.0,
        flags=("--headers-timeout",),
        panel=LIMITS,
    )
    keep_alive_timeout_s: int = option(
        5,
        "Seconds after which an idle connection is closed.",
        low=1,
        flags=("--keep-alive-timeout",),
        panel=LIMITS,
    )
    max_connections: int = option(1024, "Maximum number of open connections.", low=1, panel=LIMITS)
    max_connections_per_address: int = option(
        128,
        "Maximum number of open connections per client address; a proxy counts as one.",
        low=1,
        panel=LIMITS,
    )
    max_n: int = option(64, "Maximum number of outputs per prompt (n).", low=1, panel=LIMITS)
    max_queue_len: int = option(
        1024, "Maximum number of waiting requests; further ones get a 429.", low=1, panel=LIMITS
    )
    max_outputs_per_request: int = option(
        1024, "Maximum number of outputs per request: prompts times n.", low=1, panel=LIMITS
    )
    max_logprobs_per_request: int = option(
        1 << 16,
        "Maximum number of log-probabilities per answer: tokens of prompts and outputs times (logprobs + 1).",
        low=1,
        panel=LIMITS,
    )
    max_concurrent_requests_per_key: int | None = option(
        None,
        "Maximum number of POST requests in flight per API key; further ones get a 429.",
        low=1,
        panel=LIMITS,
    )
    max_concurrent_outputs_per_key: int | None = option(
        None,
        "Maximum number of outputs in flight per API key: prompts times n. Default: half of --max-queue-len "
        "if there are several keys.",
        low=1,
        panel=LIMITS,
    )
    min_priority: int = option(
        0,
        "Most urgent priority (lowest number) that a request may ask for. The operator may ask for any.",
        low=-MAX_INT32 - 1,
        high=MAX_INT32,
        panel=LIMITS,
    )
    client_kv_compression: bool = option(
        True, "Let requests choose their own kv_compression.", panel=COMPRESSION
    )
    min_kv_compression_interval: int = option(
        16, "Smallest interval that a request may ask for.", low=1, panel=LIMITS
    )
    max_kv_budget: int | None = option(
        None, "Largest budget in tokens that a request may ask for.", low=1, panel=LIMITS
    )
    max_kv_query_window: int = option(
        64, "Largest window of recent queries that a request's policy may use.", low=0, panel=LIMITS
    )
    default_max_tokens: int = option(16, "max_tokens of completions that do not set it.", low=1, panel=LIMITS)
    responses_db: str | None = option(
        None,
        "SQLite file in which /v1/responses keeps its answers. Default: memory, until the server ends.",
        panel=CACHING,
    )
    max_stored_responses: int = option(
        1024,
        "Maximum number of responses kept per API key; the least recently used go. 0 keeps none.",
        low=0,
        panel=LIMITS,
    )
    max_stored_responses_bytes: int = option(
        1 << 26,
        "Maximum size of the responses kept per API key, each with its conversation; a larger one is not "
        "kept.",
        low=1,
        panel=LIMITS,
    )
    shutdown_timeout_s: float = option(
        30.0,
        "Seconds that running requests may take to finish after SIGTERM.",
        low=0.0,
        high=86_400.0,
        flags=("--shutdown-timeout",),
        panel=LIMITS,
    )
    allow_special_tokens_in_text: bool = option(
        False,
        "Read control tokens that are spelled in messages, tools and template variables as control tokens.",
        panel=MODEL,
    )
    chat_template: str | None = option(
        None, "File with a Jinja chat template. Default: the model's own.", typed_as=Path, panel=MODEL
    )
    system: str = option("", "System prompt of conversations that have none.", panel=MODEL)
    tool_call_parser: str = option(
        AUTO,
        "Format of tool calls. With auto the chat template shows it.",
        choices=(AUTO, NONE, *TOOL_PARSERS),
        panel=FIRST,
    )
    reasoning_parser: str = option(
        AUTO,
        "Format of reasoning. With auto the chat template shows it.",
        choices=(AUTO, NONE, *REASONING_PARSERS),
        panel=FIRST,
    )
    engine_process: bool = option(True, "Run the engine in a process of its own, not in a thread.")
    log_prompts: bool = option(False, "Log prompts and answers too.", panel=OBSERVABILITY)
    otlp_traces_endpoint: str | None = option(
        None, "URL to send traces to, as OTLP over HTTP.", panel=OBSERVABILITY
    )
    trust_traceparent: bool = option(
        False,
        "Make a client's traceparent the parent of its spans and let it decide on sampling; otherwise link "
        "it.",
        panel=OBSERVABILITY,
    )

    def __post_init__(self) -> None:
        check_options(self)
        require(bool(self.served_model_name), "served_model_name is empty; pass at least one name.")
        require(
            self.responses_db != "",
            "responses_db is empty; pass the path of a file, or nothing for memory.",
            "responses_db",
        )
        for origin in self.allowed_origins:
            parts = urlsplit(origin)
            require(
                origin == "*"
                or (parts.scheme in ("http", "https") and origin == f"{parts.scheme}://{parts.netloc}"),
                f"allowed_origins has {origin!r}; pass scheme, host and port alone, such as "
                "http://localhost:3000, or *.",
                "allowed_origins",
            )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Options of a server of several models. Raises: InvalidArgumentError."""

    max_loaded: int = option(3, "Maximum number of models in memory.", low=1, high=50)
    idle_timeout_s: float = option(
        300.0,
        "Seconds without a request after which a model is unloaded. 0: never.",
        low=0.0,
        high=float(MAX_INT32),
        flags=("--idle-timeout",),
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class Preset:
    """One of several models.

    names:      in requests; the first is its key in the file
    arguments:  of `kvreclaim serve`
    memory_gib: its part of --memory-limit; None: an equal share
    """

    names: tuple[str, ...]
    arguments: tuple[str, ...]
    memory_gib: float | None = None


def check_url(name: str, value: str) -> None:
    """Raises InvalidArgumentError unless value is an http or https URL."""
    parts = urlsplit(value)
    require(
        parts.scheme in ("http", "https") and bool(parts.hostname),
        f"{name} is {value!r}; pass a URL such as http://127.0.0.1:4318/v1/traces.",
    )
