"""Figures of answers and of a conversation, as lines and tables."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console
from rich.table import Table

from kvreclaim.cli.chat.dialogue import AnswerFigures, Dialogue
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.options import settings_of
from kvreclaim.sampling_params import SamplingParams

Rows = Iterable[tuple[str, str]]


def print_table(rows: Rows) -> None:
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    Console(stderr=True).print(table, markup=False)


def short_line(answer: AnswerFigures) -> str:
    """One line behind an answer."""
    metrics = answer.metrics
    cached = f", {metrics.num_cached_tokens:,} cached" if metrics.num_cached_tokens else ""
    parts = [
        f"prompt {metrics.num_prompt_tokens:,} tokens{cached}{_rate(_prompt_rate(metrics))}",
        f"answer {metrics.num_generated_tokens:,}{_rate(_answer_rate(metrics))}",
        f"conversation {answer.num_tokens:,} tokens in {answer.blocks_held:,} blocks, "
        f"{answer.blocks_freed:,} freed",
    ]
    parts.append(answer.ending)
    return f"[{' · '.join(parts)}]"


def answer_rows(answer: AnswerFigures) -> Rows:
    """All figures of an answer, the first ones as ollama names them."""
    metrics = answer.metrics
    computed = metrics.num_prompt_tokens - metrics.num_cached_tokens
    yield "total duration", _seconds(metrics.e2e_s)
    yield "prompt eval count", f"{computed:,} tokens"
    yield "prompt cached", f"{metrics.num_cached_tokens:,} tokens"
    yield "prompt eval duration", _seconds(_prompt_s(metrics))
    yield "prompt eval rate", _per_second(_prompt_rate(metrics))
    yield "eval count", f"{metrics.num_generated_tokens:,} tokens"
    yield "eval duration", _seconds(_answer_s(metrics))
    yield "eval rate", _per_second(_answer_rate(metrics))
    yield "finish reason", answer.ending
    yield from conversation_rows(answer)


def conversation_rows(answer: AnswerFigures) -> Rows:
    yield "conversation", f"{answer.num_tokens:,} tokens"
    yield "blocks held", f"{answer.blocks_held:,}"
    yield "blocks freed", f"{answer.blocks_freed:,} by compression"


def show_rows(dialogue: Dialogue) -> Rows:
    """Model, cache, compression, conversation and sampling."""
    llm, config = dialogue.llm, dialogue.compression
    loaded, pool = llm.loaded, llm.stats().memory
    facts, engine = loaded.facts, llm.engine
    yield "model", f"{loaded.name}: {loaded.weight_bytes / 1e6:,.0f} MB, {facts.dtype} on {facts.device}"
    yield "context", f"{engine.longest:,} tokens"
    yield "kernels", engine.kernels
    yield (
        "cache",
        f"{engine.kv_format.name}, {pool.num_blocks:,} blocks of {engine.memory.block_size} tokens: "
        f"{pool.cached:,} cached, {pool.free:,} free",
    )
    yield "compression", "none" if config is None else config.in_words
    yield "statistics", str(llm.stats_file) if llm.stats_file.is_file() else "none"
    if dialogue.last is not None:
        yield from conversation_rows(dialogue.last)
    sampling = sampling_rows(dialogue.params, all_=False)
    yield "sampling", ", ".join(f"{name} {value}" for name, value in sampling)
    yield "system prompt", dialogue.system or "none"


def sampling_rows(params: SamplingParams, *, all_: bool) -> Rows:
    """Settings of sampling, all or those that differ from the defaults."""
    for name, setting in settings_of(SamplingParams).items():
        value = getattr(params, name)
        if setting.spec.help and (all_ or value != setting.default):
            yield name, "none" if value is None else str(value)


def _prompt_s(metrics: RequestMetrics) -> float | None:
    return None if metrics.ttft_s is None or metrics.queue_s is None else metrics.ttft_s - metrics.queue_s


def _answer_s(metrics: RequestMetrics) -> float | None:
    return None if metrics.ttft_s is None or metrics.e2e_s is None else metrics.e2e_s - metrics.ttft_s


def _prompt_rate(metrics: RequestMetrics) -> float | None:
    seconds = _prompt_s(metrics)
    return (metrics.num_prompt_tokens - metrics.num_cached_tokens) / seconds if seconds else None


def _answer_rate(metrics: RequestMetrics) -> float | None:
    """Tokens behind the first, which the prompt's last step brings."""
    seconds = _answer_s(metrics)
    return (
        (metrics.num_generated_tokens - 1) / seconds if seconds and metrics.num_generated_tokens > 1 else None
    )


def _rate(rate: float | None) -> str:
    return "" if rate is None else f", {rate:,.1f}/s"


def _per_second(rate: float | None) -> str:
    return "-" if rate is None else f"{rate:,.2f} tokens/s"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.3f} s"
