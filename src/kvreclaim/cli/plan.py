"""`kvreclaim plan`: how much memory, how many sequences, which card, from a config.json alone."""

from __future__ import annotations

from typing import Annotated

import typer

from kvreclaim.checks import require
from kvreclaim.cli.options import DEMO, Figures, model_of
from kvreclaim.cli.takes import Takes, takes
from kvreclaim.outputs import write_json
from kvreclaim.plan.asked import PlanRequest


@takes
def plan(
    asked: Annotated[PlanRequest, Takes(config=PlanRequest)],
    file: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As --model.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory with a config.json, such a file, a .gguf file, a model whose config comes along, "
            f"such as Qwen/Qwen3-32B, or {DEMO}; where none is named: what `kvreclaim fetch` brought, else "
            f"{DEMO}."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic line by line.")] = False,
    json_file: Figures = None,
) -> None:
    """Say what a model takes and what a card holds, without weights, torch or a GPU."""
    from kvreclaim.plan.answer import plan as answer_of
    from kvreclaim.plan.sections import lines

    require(file is None or model is None, "the model is named twice; leave out --model.", "model")
    answer = answer_of(model_of(model if file is None else file), asked)
    if json_file is not None:
        write_json(json_file, answer.values)
    typer.echo("\n".join(lines(answer, explain=explain)))
