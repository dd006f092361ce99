"""`kvreclaim plan`: how much memory, how many sequences, which card, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.cli.options import DEMO, model_of
from kvreclaim.cli.takes import Takes, takes
from kvreclaim.plan.asked import Asked


@takes
def plan(
    asked: Annotated[Asked, Takes(config=Asked)],
    model: Annotated[
        str | None,
        typer.Option(
            help="Directory with a config.json, such a file, a model whose config comes along, such as "
            f"Qwen/Qwen3-32B, or {DEMO}; where none is named: what `kvreclaim fetch` brought, else {DEMO}."
        ),
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic line by line.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Say what a model takes and what a card holds, without weights, torch or a GPU."""
    from kvreclaim.plan.answer import plan as answer_of
    from kvreclaim.plan.sections import lines

    answer = answer_of(model_of(model), asked)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(answer.values, indent=1) + "\n", encoding="utf-8")
    typer.echo("\n".join(lines(answer, explain=explain)))
