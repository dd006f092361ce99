"""`kvreclaim serve`: a model behind OpenAI's and Anthropic's protocols."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.cli import options as opt
from kvreclaim.cli.compression import compression_of

if TYPE_CHECKING:
    from kvreclaim.server.config import ServerConfig

SERVER = "server"


def _option(*names: str, **facts: Any) -> Any:
    return typer.Option(*names, rich_help_panel=SERVER, **facts)


def serve(
    model: opt.ModelOption = None,
    served_model_name: Annotated[list[str] | None, _option(help="Names in the API; the model's own.")] = None,
    host: Annotated[str, _option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, _option(help="Port; 0 takes a free one.")] = 8000,
    api_key: Annotated[list[str] | None, _option(envvar="KVRECLAIM_API_KEY", help="One per tenant.")] = None,
    operator_key: Annotated[str | None, _option(envvar="KVRECLAIM_OPERATOR_KEY")] = None,
    max_body_bytes: Annotated[int, _option()] = 16 << 20,
    max_n: Annotated[int, _option(help="Outputs per request.")] = 64,
    max_queue_len: Annotated[int, _option(help="Waiting requests; more get a 429.")] = 1024,
    max_concurrent_requests_per_key: Annotated[int | None, _option()] = None,
    min_kv_compression_interval: Annotated[int, _option(help="Tokens that a request may ask for.")] = 16,
    max_kv_budget: Annotated[int | None, _option(help="Tokens that a request may ask for.")] = None,
    max_kv_query_window: Annotated[int, _option(help="Queries that a request's policy looks back on.")] = 64,
    default_max_tokens: Annotated[int, _option(help="Of a completion that names no limit.")] = 16,
    shutdown_timeout: Annotated[float, _option(help="Seconds for running requests after SIGTERM.")] = 30.0,
    chat_template: Annotated[Path | None, _option(help="Jinja file instead of the model's own.")] = None,
    tool_call_parser: Annotated[str | None, _option(help="How the model writes tool calls: hermes.")] = None,
    log_level: Annotated[str, _option(help="debug, info, warning or error.")] = "info",
    log_format: Annotated[str, _option(help="json, text, or auto: text on a terminal.")] = "auto",
    log_prompts: Annotated[bool, _option("--log-prompts", help="Prompts and answers too.")] = False,
    otlp_traces_endpoint: Annotated[str | None, _option(help="OTLP over HTTP.")] = None,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
    kernels: opt.Kernels = "auto",
    kv_cache_dtype: opt.KVCacheDType = "auto",
    block_size: opt.EngineInt = 16,
    num_gpu_blocks_override: opt.NumBlocks = None,
    max_num_seqs: opt.EngineInt = 64,
    max_num_batched_tokens: opt.EngineInt = 2048,
    max_model_len: opt.EngineLimit = None,
    enable_prefix_caching: opt.PrefixCaching = True,
    kv_memory_fraction: opt.KVMemoryFraction = 0.5,
    enforce_eager: opt.EnforceEager = False,
    scheduling_policy: Annotated[str, _option(help="fcfs or priority.")] = "fcfs",
    eviction_policy: Annotated[str, _option(help="lru, slru, lfu, priority or gdsf.")] = "lru",
    max_pinned_fraction: Annotated[float, _option(help="Of all blocks, at most so many pinned.")] = 0.5,
    kv_cache_metrics_sample: Annotated[float, _option(help="Share of blocks whose life is timed.")] = 0.01,
    seed: opt.EngineInt = 0,
    kv_compression: opt.Policy = None,
    kv_budget: opt.Budget = None,
    kv_compression_interval: opt.CompressionInt = None,
    kv_compression_mode: opt.CompressionText = None,
    kv_compression_stats: opt.CompressionText = None,
    kv_sinks: opt.CompressionInt = None,
    kv_recent: opt.CompressionInt = None,
    kv_protect_prompt: opt.ProtectPrompt = False,
) -> None:
    """Serve a model to OpenAI and Anthropic clients, with a page at / to watch its blocks."""
    given = dict(locals())
    with opt.usage_errors():
        _run(given)


def _run(given: dict[str, Any]) -> None:
    """Listens before the model is loaded, so that a port in use is said at once."""
    from kvreclaim import LLM, demo_model
    from kvreclaim.config import EngineConfig
    from kvreclaim.model.loader import hide_progress_bars
    from kvreclaim.server.logs import configure_logging
    from kvreclaim.server.run import bind, serve

    hide_progress_bars()
    configure_logging(given["log_format"], given["log_level"], log_prompts=given["log_prompts"])
    config = _server_config(given)
    with bind(config.host, config.port) as listener:
        llm = LLM(
            given["model"] or demo_model(),
            num_blocks=given["num_gpu_blocks_override"],
            compression=compression_of(given),
            dtype=given["dtype"],
            device=given["device"],
            **opt.fields_of(EngineConfig, given),
        )
        serve(llm, config, listener)


def _server_config(given: dict[str, Any]) -> ServerConfig:
    from kvreclaim.server.config import ServerConfig

    renamed = {
        "served_model_name": tuple(given["served_model_name"] or (given["model"] or "kvreclaim-demo",)),
        "api_keys": tuple(given["api_key"] or ()),
        "shutdown_timeout_s": given["shutdown_timeout"],
        "chat_template": _text_of(given["chat_template"]),
    }
    return ServerConfig(**opt.fields_of(ServerConfig, given) | renamed)


def _text_of(template: Path | None) -> str | None:
    from kvreclaim.errors import InvalidArgumentError

    if template is None:
        return None
    try:
        return template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(
            f"--chat-template {template} is no file of UTF-8 text ({type(error).__name__}); "
            "pass a Jinja template."
        ) from error
