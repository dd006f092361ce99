"""`kvreclaim plan`: how much memory, how many sequences, which card, from a config.json alone."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvreclaim.checks import require
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.model_names import local_model, model_of
from kvreclaim.cli.options import DEMO, Figures
from kvreclaim.errors import printable
from kvreclaim.outputs import write_json
from kvreclaim.plan.plan_request import PlanRequest


@with_config
def plan(
    request: Annotated[PlanRequest, ConfigOptions(config=PlanRequest)],
    file: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="Same as --model.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model: a config.json, its directory, a .gguf file, a bundled "
            "name such as Qwen/Qwen3-32B, or "
            f"{DEMO}. Default: the model that `kvreclaim fetch` downloaded, else {DEMO}."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic line by line.")] = False,
    json_file: Figures = None,
) -> None:
    """Estimate memory and concurrency from a config.json, without weights, torch or a GPU."""
    from kvreclaim.plan.answer import plan as answer_of
    from kvreclaim.plan.sections import lines

    require(file is None or model is None, "the model is named twice; leave out --model.", "model")
    named = model if file is None else file
    is_path = named in (None, DEMO) or os.path.exists(str(named))
    answer = answer_of(model_of(named) if is_path else local_model(str(named)) or str(named), request)
    if json_file is not None:
        write_json(json_file, answer.values)
    typer.echo("\n".join(map(printable, lines(answer, explain=explain))))
