"""`kvreclaim serve --models FILE`: presets of several models, in YAML by their names."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import typer

from kvreclaim.checks import require
from kvreclaim.cli.config_file import FLAG, preset_args, read_yaml
from kvreclaim.cli.model_names import model_of
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.server.base.config import Preset

MODELS = "--models"
ModelsFile = typer.Option(
    MODELS,
    metavar="<path>",
    help="YAML file with several models, by name. Each is loaded at its first use.",
)
OF_SERVER = (
    *("--host", "--port", "--api-key", "--operator-key", "--tenant-secret", "--allowed-hosts"),
    *("--allowed-origins", "--max-connections", "--max-connections-per-address", "--headers-timeout"),
    *("--body-timeout", "--keep-alive-timeout", "--max-concurrent-requests-per-key", "--shutdown-timeout"),
    *("--log-format", MODELS, FLAG),
)
"""Options of the server in front of all models; a preset may not have them."""
OF_SEVERAL = ("--max-loaded", "--idle-timeout")
OF_BOTH = ("--memory-limit", "--max-body-bytes", "--log-level")


def check_given(context: typer.Context, *, several: bool) -> None:
    """Refuse options on the command line that have no effect with --models, or without it. Raises:
    InvalidArgumentError."""
    for each in context.command.params:
        source, flag = context.get_parameter_source(str(each.name)), each.opts[0]
        if source is None or source.name != "COMMANDLINE":
            continue
        require(
            several or flag not in OF_SEVERAL, f"{flag} is an option of several models; pass {MODELS} too."
        )
        require(
            not several or flag in (*OF_SERVER, *OF_SEVERAL, *OF_BOTH),
            f"{flag} is an option of one model; put it into the presets of {MODELS}.",
        )


def presets_of(path: str, context: typer.Context, *shared: str) -> list[Preset]:
    """Read the presets of a command. shared: arguments that a preset may replace. Raises:
    InvalidArgumentError."""
    found = read_yaml(path, MODELS)
    require(bool(found), f"{MODELS} is {path!r}, which has no model; add a preset by its name.")
    presets = [_preset(context, f"{path}: {name}", str(name), found[name], shared) for name in found]
    names = [name for preset in presets for name in preset.names]
    twice = next((name for name in names if names.count(name) > 1), None)
    require(twice is None, f"{path} has two models named {twice!r}; rename one.")
    return presets


def _preset(context: typer.Context, label: str, name: str, options: Any, shared: tuple[str, ...]) -> Preset:
    require(isinstance(options, dict), f"{label} is {options!r}; give it options, such as {{model: demo}}.")
    command, group = context.command, context.parent
    own: Container[str] = (str(command.name),)
    commands = getattr(group.command, "commands", own) if group is not None else own
    flags = {
        flag: getattr(each, "multiple", False) or each.nargs != 1
        for each in command.params
        for flag in each.opts
        if flag not in (*OF_SERVER, *OF_SEVERAL)
    }
    arguments = (*shared, *preset_args(label, options, str(command.name), commands, flags))
    try:
        values = command.make_context(command.name, list(arguments), parent=group).params
        require(values["model"] is not None, "model is missing; name one.")
        model_of(values["model"])
    except (typer.BadParameter, InvalidArgumentError) as error:
        text = error.format_message() if isinstance(error, typer.BadParameter) else str(error)
        raise InvalidArgumentError(f"{label}: {text}") from error
    names = (name, *(values["config_served_model_name"] or ()))
    return Preset(names, arguments, values["engine_memory_limit"])
