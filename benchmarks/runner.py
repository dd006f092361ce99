"""The runner of the benchmarks in this folder. A case is a function from its options, a plan, to rows; the
runner adds the plan's facts to them, prints a table and writes JSON.

    python -m benchmarks CASE --model DIR --json FILE
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, get_type_hints

from kvreclaim.bench.common import Columns, Row, sheet
from kvreclaim.bench.plans import ModelPlan
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import Json, publish, ready
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.help import CommandApp
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import RequestOutput
from kvreclaim.options import option
from kvreclaim.sampling_params import SamplingParams

app = CommandApp(no_args_is_help=True, help="Benchmarks of single parts of kvreclaim.")
ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command under the function's name, with its parameters as `with_config` reads them."""
    app.command(function.__name__)(with_config(function))
    return function


def case(
    title: str, columns: Columns, *, text_columns: int = 1, lines: Callable[[list[Row]], list[Row]] = list
) -> Callable[[Callable[[Any], Iterable[Row]]], Callable[[Any], Iterable[Row]]]:
    """A command of a function from a plan to rows.

    Args:
        title:   of the table; may name fields of the first row
        lines:   lines of the table, from the rows
    """

    def register(function: Callable[[Any], Iterable[Row]]) -> Callable[[Any], Iterable[Row]]:
        def run(plan: Any, json_file: Path | None = None) -> None:
            with ready(plan.threads):
                rows = [plan.facts() | row for row in function(plan)]
                made = sheet(title.format_map(rows[0]), columns, lines(rows), text_columns=text_columns)
                publish(rows, [made], json_file)

        config = get_type_hints(function)["plan"]
        run.__name__, run.__doc__ = function.__name__, function.__doc__
        run.__annotations__ |= {"plan": Annotated[config, ConfigOptions(config=config)], "json_file": Json}
        command(run)
        return function

    return register


@dataclass(frozen=True, kw_only=True)
class TextPlan(ModelPlan):
    """A benchmark of prompts that a text may give."""

    text: Path | None = option(None, "UTF-8 text that prompts are cut from; else random tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.text is None or self.text.is_file(),
            f"--text is {str(self.text)!r}, which is no file; name one, or leave it out.",
        )


def timed(
    llm: LLM, prompt: Any, params: SamplingParams, compression: CompressionConfig | None = None
) -> tuple[float, RequestOutput]:
    """Seconds of one request, and its output. Raises: AssertionError if it failed."""
    started = perf_counter()
    (output,) = llm.generate(prompt, params, compression)
    elapsed_s = perf_counter() - started
    assert output.error is None, f"a request failed: {output.error}"
    return elapsed_s, output


def ratios(times: Sequence[float], others: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(times, others, strict=True)]
