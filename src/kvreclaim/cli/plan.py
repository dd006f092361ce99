"""`kvreclaim plan`: how much memory, how many sequences, which card, from a config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kvreclaim.cli.options import ModelOption, model_of
from kvreclaim.cli.takes import Takes, takes
from kvreclaim.plan.asked import Asked


@takes
def plan(
    asked: Annotated[Asked, Takes(config=Asked)],
    model: ModelOption = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print the arithmetic line by line.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Say what a model takes and what a card holds, without weights, torch or a GPU.

    --model is a directory with a config.json, such a file, or the name of a model whose config comes
    along, such as Qwen/Qwen3-32B.
    """
    from kvreclaim.plan.answer import plan as answer_of
    from kvreclaim.plan.sections import lines

    answer = answer_of(model_of(model), asked)
    if json_file is not None:
        json_file.write_text(json.dumps(answer.values, indent=1) + "\n", encoding="utf-8")
    typer.echo("\n".join(lines(answer, explain=explain)))
