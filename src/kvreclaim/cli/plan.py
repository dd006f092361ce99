"""`kvreclaim plan`: how much memory, how many sequences, which card, from a config.json alone."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.model_names import local_model, model_of
from kvreclaim.cli.options import DEMO, Figures
from kvreclaim.errors import printable
from kvreclaim.outputs import write_json
from kvreclaim.plan.plan_request import PlanRequest


@with_config
def plan(
    request: Annotated[PlanRequest, ConfigOptions(config=PlanRequest)],
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

    is_path = model in (None, DEMO) or os.path.exists(str(model))
    answer = answer_of(model_of(model) if is_path else local_model(str(model)) or str(model), request)
    if json_file is not None:
        write_json(json_file, answer.values)
    typer.echo("\n".join(map(printable, lines(answer, explain=explain))))
