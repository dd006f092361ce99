"""`kvreclaim generate`: stream one prompt's text, then the request's metrics."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.cli import options as opt
from kvreclaim.cli.compression import compression_of

if TYPE_CHECKING:
    from rich.table import Table

    from kvreclaim import LLM, CompressionConfig, SamplingParams
    from kvreclaim.engine.core.outputs import RequestMetrics, RequestOutput


def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: opt.ModelOption = None,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
    kernels: opt.Kernels = "auto",
    kv_cache_dtype: opt.KVCacheDType = "auto",
    block_size: opt.EngineInt = 16,
    num_gpu_blocks_override: opt.NumBlocks = None,
    max_num_batched_tokens: opt.EngineInt = 2048,
    max_model_len: opt.EngineLimit = None,
    enable_prefix_caching: opt.PrefixCaching = True,
    max_tokens: opt.SamplingLimit = 256,
    temperature: opt.SamplingNumber = 0.0,
    top_p: opt.SamplingNumber = 1.0,
    top_k: opt.SamplingInt = 0,
    min_p: opt.SamplingNumber = 0.0,
    seed: opt.SamplingLimit = None,
    stop: opt.Stop = None,
    ignore_eos: opt.IgnoreEos = False,
    kv_compression: opt.Policy = None,
    kv_budget: opt.Budget = None,
    kv_compression_interval: opt.CompressionInt = None,
    kv_compression_mode: opt.CompressionText = None,
    kv_compression_stats: opt.CompressionText = None,
    kv_sinks: opt.CompressionInt = None,
    kv_recent: opt.CompressionInt = None,
    kv_protect_prompt: opt.ProtectPrompt = False,
) -> None:
    """Generate from one prompt; text goes to standard output, metrics to standard error."""
    given = dict(locals())
    with opt.usage_errors():
        _run(given)


SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos")
ENGINE = (
    "dtype",
    "device",
    "kernels",
    "kv_cache_dtype",
    "block_size",
    "max_num_batched_tokens",
    "max_model_len",
    "enable_prefix_caching",
)


def _run(given: dict[str, Any]) -> None:
    """Torch and transformers are imported here, so that --help and a usage error need neither."""
    from kvreclaim import LLM, SamplingParams, demo_model
    from kvreclaim.model.loader import hide_progress_bars

    hide_progress_bars()
    compression = compression_of(given)
    params = SamplingParams(**{name: given[name] for name in SAMPLING})
    llm = LLM(
        given["model"] or demo_model(),
        num_blocks=given["num_gpu_blocks_override"],
        max_num_seqs=1,
        **{name: given[name] for name in ENGINE},
    )
    _stream(llm, given["prompt"], params, compression)


def _stream(llm: LLM, prompt: str, params: SamplingParams, compression: CompressionConfig | None) -> None:
    from rich.console import Console

    printed = 0
    last: RequestOutput | None = None
    for last in llm.stream(prompt, params, compression):
        if last.metrics.num_generated_tokens <= 1:
            typer.echo(llm.engine.kernels, err=True)
        text = last.outputs[0].text
        typer.echo(text[printed:], nl=False)
        printed = len(text)
    typer.echo()
    assert last is not None, "a request yields at least one output"
    if last.error is not None:
        typer.echo(f"error: {last.error}", err=True)
        raise typer.Exit(1)
    Console(stderr=True).print(_metrics_table(last.metrics, last.outputs[0].finish_reason))


def _metrics_table(metrics: RequestMetrics, finish_reason: str | None) -> Table:
    from rich.table import Table

    table = Table(show_header=False)
    table.add_row("finish_reason", str(finish_reason))
    for field in fields(metrics):
        value = getattr(metrics, field.name)
        table.add_row(field.name, f"{value:.3f}" if isinstance(value, float) else str(value))
    efficiency = metrics.reclaim_efficiency
    table.add_row("reclaim_efficiency", "-" if efficiency is None else f"{efficiency:.2f}")
    return table
