"""`kvreclaim rm`: delete a fetched model, or a copy of packed weights."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvreclaim.checks import require
from kvreclaim.cli.config_options import with_config
from kvreclaim.cli.local_models import LocalModel, local_models
from kvreclaim.errors import InvalidArgumentError, printable
from kvreclaim.model.quantized.copy_file import copy_files
from kvreclaim.model_paths import directory_name, models_home
from kvreclaim.temporary import remove_left_over, temporary_directory


@with_config
def rm(
    name: Annotated[str, typer.Argument(help="Name that `kvreclaim ls` prints, or the fetched hub id.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Delete a model that `kvreclaim fetch` wrote, with its statistics and the copies of its packed
    weights, or such a copy, or a GGUF file that cannot be read, or what a killed command left over."""
    model = deletable(name)
    size = f"{model.num_bytes / 1e6:,.0f} MB"
    if not yes and not typer.confirm(printable(f"Delete {model.path} ({size})?"), err=True):
        typer.echo("nothing is deleted", err=True)
        raise typer.Exit(1)
    try:
        _delete(model)
    except OSError as error:
        raise InvalidArgumentError(
            f"{str(model.path)!r} cannot be deleted ({error.strerror}); see to the rights of its folder."
        ) from error
    typer.echo(printable(f"{model.name}: {size} freed"))


def _delete(model: LocalModel) -> None:
    """Raises: OSError."""
    if model.is_left_over:
        remove_left_over(model.path.parent)
        return
    if not model.is_fetched:
        model.path.unlink()
        return
    copies = [each for each in copy_files() if each.source.is_relative_to(model.path.resolve())]
    with temporary_directory(models_home(), "rm") as made:
        os.replace(model.path, os.path.join(made, "model"))  # it goes whole, or not at all
    for copy in copies:
        copy.path.unlink(missing_ok=True)


def deletable(name: str) -> LocalModel:
    """Raises: InvalidArgumentError for all that kvreclaim did not write and can read."""
    models = {each: model for model in local_models() for each in (printable(model.name), model.name)}
    model = models.get(name) or models.get(directory_name(name))
    fetched = ", ".join(each.name for each in models.values() if each.is_fetched) or "none"
    require(
        model is not None,
        f"{name!r} is no model in {str(models_home())!r}, and nothing else is deleted; fetched models are: "
        f"{fetched}.",
        "name",
    )
    assert model is not None
    require(
        model.is_fetched or model.is_copy or model.is_damaged or model.is_left_over,
        f"{str(model.path)!r} is no directory that `kvreclaim fetch` wrote, so it is not deleted; fetched "
        f"models are: {fetched}.",
        "name",
    )
    return model
