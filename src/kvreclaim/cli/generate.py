"""`kvreclaim generate`: stream one prompt's text, then the request's metrics."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.cli.options import ModelOption, usage_errors
from kvreclaim.engine.outputs import RequestMetrics, RequestOutput
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.loader import hide_progress_bars

Engine = "engine"
Sampling = "sampling"
Compression = "KV compression"


def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue.")],
    model: ModelOption = None,
    dtype: Annotated[str, typer.Option(rich_help_panel=Engine)] = "auto",
    device: Annotated[str, typer.Option(rich_help_panel=Engine)] = "auto",
    block_size: Annotated[int, typer.Option(rich_help_panel=Engine)] = 16,
    num_gpu_blocks_override: Annotated[
        int | None, typer.Option("--num-blocks", "--num-gpu-blocks-override", rich_help_panel=Engine)
    ] = None,
    max_num_batched_tokens: Annotated[int, typer.Option(rich_help_panel=Engine)] = 2048,
    max_model_len: Annotated[int | None, typer.Option(rich_help_panel=Engine)] = None,
    enable_prefix_caching: Annotated[
        bool,
        typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", rich_help_panel=Engine),
    ] = True,
    max_tokens: Annotated[int | None, typer.Option(rich_help_panel=Sampling)] = 256,
    temperature: Annotated[float, typer.Option(rich_help_panel=Sampling)] = 0.0,
    top_p: Annotated[float, typer.Option(rich_help_panel=Sampling)] = 1.0,
    top_k: Annotated[int, typer.Option(rich_help_panel=Sampling)] = 0,
    min_p: Annotated[float, typer.Option(rich_help_panel=Sampling)] = 0.0,
    seed: Annotated[int | None, typer.Option(rich_help_panel=Sampling)] = None,
    stop: Annotated[list[str] | None, typer.Option(rich_help_panel=Sampling)] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", rich_help_panel=Sampling)] = False,
    kv_compression: Annotated[
        str | None,
        typer.Option(help="Policy; the KV cache stays whole without.", rich_help_panel=Compression),
    ] = None,
    kv_budget: Annotated[int | None, typer.Option(help="Tokens kept.", rich_help_panel=Compression)] = None,
    kv_compression_interval: Annotated[int | None, typer.Option(rich_help_panel=Compression)] = None,
    kv_compression_mode: Annotated[str | None, typer.Option(rich_help_panel=Compression)] = None,
    kv_compression_stats: Annotated[str | None, typer.Option(rich_help_panel=Compression)] = None,
    kv_sinks: Annotated[int | None, typer.Option(rich_help_panel=Compression)] = None,
    kv_recent: Annotated[int | None, typer.Option(rich_help_panel=Compression)] = None,
    kv_protect_prompt: Annotated[
        bool, typer.Option("--kv-protect-prompt", rich_help_panel=Compression)
    ] = False,
) -> None:
    """Generate from one prompt; text goes to standard output, metrics to standard error."""
    given = {
        "budget": kv_budget,
        "interval": kv_compression_interval,
        "mode": kv_compression_mode,
        "stats": kv_compression_stats,
        "sinks": kv_sinks,
        "recent": kv_recent,
        "protect_prompt": kv_protect_prompt or None,
    }
    with usage_errors():
        hide_progress_bars()
        compression = _compression(kv_compression, given)
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            seed=seed,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        llm = LLM(
            model or demo_model(),
            dtype=dtype,
            device=device,
            block_size=block_size,
            num_blocks=num_gpu_blocks_override,
            max_num_seqs=1,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_prefix_caching=enable_prefix_caching,
        )
        _stream(llm, prompt, params, compression)


def _compression(policy: str | None, given: dict[str, Any]) -> CompressionConfig | None:
    settings = {name: value for name, value in given.items() if value is not None}
    if policy is None:
        if settings:
            raise InvalidArgumentError(
                f"{', '.join(settings)} set for the KV compression, but no policy is; "
                "add --kv-compression, for example --kv-compression query_mixture."
            )
        return None
    return CompressionConfig(policy, **settings)


def _stream(llm: LLM, prompt: str, params: SamplingParams, compression: CompressionConfig | None) -> None:
    printed = 0
    last: RequestOutput | None = None
    for last in llm.stream(prompt, params, compression):
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
    table = Table(show_header=False)
    table.add_row("finish_reason", str(finish_reason))
    for field in fields(metrics):
        value = getattr(metrics, field.name)
        table.add_row(field.name, f"{value:.3f}" if isinstance(value, float) else str(value))
    efficiency = metrics.reclaim_efficiency
    table.add_row("reclaim_efficiency", "-" if efficiency is None else f"{efficiency:.2f}")
    return table
