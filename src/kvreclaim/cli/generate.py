"""`kvreclaim generate`: stream one prompt's text, then the request's metrics."""

from __future__ import annotations

import json
from contextlib import closing
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.cli import options as opt
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.model_names import model_of
from kvreclaim.config import EngineConfig
from kvreclaim.options import COMPRESSION
from kvreclaim.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvreclaim import LLM, CompressionConfig
    from kvreclaim.engine.request.outputs import RequestMetrics, RequestOutput

OF_MANY = (
    "max_num_seqs",
    "seed",
    "scheduling_policy",
    "eviction_policy",
    "max_pinned_fraction",
)
"""Options that matter only with several requests."""


@with_config
def generate(
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Text to continue, or a user message with --chat.")
    ],
    engine: Annotated[
        EngineConfig, ConfigOptions(config=EngineConfig, without=OF_MANY, defaults=opt.THREADS)
    ],
    params: Annotated[
        SamplingParams,
        ConfigOptions(
            config=SamplingParams, panel=opt.SAMPLING, defaults={"max_tokens": 256, "temperature": 0.0}
        ),
    ],
    compression: Annotated[Any, opt.Compression],
    calibrate: opt.Calibrate = False,
    chat: Annotated[
        bool,
        typer.Option("--chat", help="Apply the model's chat template to the prompt."),
    ] = False,
    session: Annotated[
        Path | None,
        typer.Option(
            help="File with the cache of prompt and answer. It is loaded first if it exists, and saved at "
            "the end, so that a continued prompt is not computed again.",
            callback=opt.writable,
        ),
    ] = None,
    compress_prompt_at: Annotated[
        int | None,
        typer.Option(
            help="Compress the prompt after this many tokens. With --session the file holds the compressed "
            "prefix, so that other questions about it do not compute it again.",
            rich_help_panel=COMPRESSION,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object: text, finish reason and figures.")
    ] = False,
    model: opt.ModelOption = None,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
) -> None:
    """Generate from one prompt. The text goes to standard output, metrics to standard error."""
    path = model_of(model)
    with opt.starting(calibrate):
        from kvreclaim import LLM
        from kvreclaim.engine.api.chat import render_chat
        from kvreclaim.model.loader import hide_progress_bars

        hide_progress_bars()
        chosen, at_start = opt.with_calibration(compression, calibrate)
        options = asdict(engine) | {"max_num_seqs": 1, "calibrate": at_start, "compression": chosen}
        started = LLM(path, dtype=dtype, device=device, **options)
    chosen = started.compression
    with closing(started) as llm, llm.compressed(None):  # the request names it; a session is saved whole
        request: dict[str, Any] = {"prompt": prompt, "compress_prompt_at": compress_prompt_at}
        if chat:
            messages = [{"role": "user", "content": request.pop("prompt")}]
            request["prompt_token_ids"] = render_chat(llm.loaded, messages)
        if session is not None and session.exists():
            typer.echo(f"{llm.load_session(session).num_tokens} tokens are restored", err=True)
        answered = _stream(llm, request, params, chosen, as_json=as_json)
        if session is not None:
            kept = {"prompt_token_ids": answered, "compress_prompt_at": compress_prompt_at}
            config = None if compress_prompt_at is None else chosen
            info = llm.save_session(kept, session, compression=config)
            typer.echo(f"{info.num_tokens} tokens are saved", err=True)


def _stream(
    llm: LLM,
    prompt: dict[str, Any],
    params: SamplingParams,
    compression: CompressionConfig | None,
    *,
    as_json: bool,
) -> list[int]:
    """Print the answer, as it comes or as one JSON object, and its figures. Returns: the tokens of prompt and
    answer."""
    printed = 0
    last: RequestOutput | None = None
    for last in llm.stream(prompt, params, compression):
        if last.metrics.num_generated_tokens <= 1:
            if compression is not None:
                opt.tell(opt.compression_line(llm, compression))
            typer.echo(llm.engine.kernels, err=True)
        if not as_json:
            text = last.outputs[0].text
            typer.echo(text[printed:], nl=False)
            printed = len(text)
    assert last is not None, "a request yields at least one output"
    if not as_json:
        typer.echo()
    if last.error is not None:
        typer.echo(f"error: {last.error}", err=True)
        raise typer.Exit(1)
    [answer] = last.outputs
    figures = {"finish_reason": answer.finish_reason, **figures_of(last.metrics)}
    if as_json:
        typer.echo(json.dumps({"text": answer.text, **figures}, ensure_ascii=False))
    else:
        _print_table(figures)
    return [*last.prompt_token_ids, *answer.token_ids]


def figures_of(metrics: RequestMetrics) -> dict[str, Any]:
    """Rates and the figures of a request that are not 0 and that apply to it."""
    found = {field.name: getattr(metrics, field.name) for field in fields(metrics)}
    found["reclaim_efficiency"] = metrics.reclaim_efficiency
    if metrics.ttft_s and metrics.queue_s is not None and metrics.ttft_s > metrics.queue_s:
        computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
        found["prompt_tokens_per_s"] = computed / (metrics.ttft_s - metrics.queue_s)
    if metrics.ttft_s and metrics.e2e_s and metrics.e2e_s > metrics.ttft_s:
        found["tokens_per_s"] = (metrics.num_generated_tokens - 1) / (metrics.e2e_s - metrics.ttft_s)
    return {name: value for name, value in found.items() if value}


def _print_table(figures: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False)
    for name, value in figures.items():
        digits = 1 if name.endswith("per_s") else 2 if name == "reclaim_efficiency" else 3
        shown = f"{value:.{digits}f}" if isinstance(value, float) else str(value)
        if shown.strip("0."):
            table.add_row(name, shown)
    Console(stderr=True).print(table)
