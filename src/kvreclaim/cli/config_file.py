"""`--config FILE`: a command's options in YAML, as in vLLM; a model's preset."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from kvreclaim.checks import require
from kvreclaim.errors import InvalidArgumentError

CONFIG_FILE, FLAG = "config_file", "--config"
ConfigFile = Annotated[
    str | None,
    typer.Option(
        FLAG,
        metavar="<path>",
        help="YAML file with options. Those of the command line win; those under the name of a command are "
        "for it alone.",
    ),
]


def with_file(args: list[str], command: str, commands: Container[str], flags: dict[str, bool]) -> list[str]:
    """The arguments, with those of a file that `--config` names before them.

    commands: names under which a file may have options of one command
    flags:    the command's flags, and whether each may be given several times
    Raises: InvalidArgumentError.
    """
    end = args.index("--") if "--" in args else len(args)
    place = next((i for i, each in enumerate(args[:end]) if each.partition("=")[0] == FLAG), None)
    if place is None:
        return args
    _, given, path = args[place].partition("=")
    if not given:
        if place + 1 >= end:
            return args  # click says that a value is missing
        path = args[place + 1]
    typed = {each.partition("=")[0] for each in args[:end]}
    return [*preset_args(path, read_yaml(path, FLAG), command, commands, flags, typed), *args]


def preset_args(
    label: str,
    preset: dict[str, Any],
    command: str,
    commands: Container[str],
    flags: dict[str, bool],
    typed: Container[str] = (),
) -> Iterator[str]:
    """Yield the command's arguments that a preset stands for. label: of the preset, for errors. typed: flags
    that win over it. Raises: InvalidArgumentError."""
    found = {str(name).replace("_", "-"): value for name, value in preset.items()}
    own = {name: value for name, value in found.items() if not isinstance(value, dict)}
    for name, value in found.items():
        if isinstance(value, dict):
            require(name in commands, f"{label} has a group {name!r}; a group is named after a command.")
            own |= value if name == command else {}
    return _flags(label, command, own, flags, typed)


def read_yaml(path: str, flag: str) -> dict[Any, Any]:
    """Read the file of an option. Raises: InvalidArgumentError."""
    import yaml

    try:
        found = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise InvalidArgumentError(f"{flag} is {path!r}, which is no file of YAML ({reason}).") from error
    require(isinstance(found, dict), f"{flag} is {path!r}; it must map options to values.")
    return dict(found)


def _flags(
    path: str, command: str, options: dict[str, Any], flags: dict[str, bool], typed: Container[str]
) -> Iterator[str]:
    for name, value in options.items():
        flag = f"--{str(name).replace('_', '-')}"
        off = f"--no-{flag[2:]}"
        require(
            flag in flags and flag != FLAG,
            f"{path} has {name!r}, which is no option of `kvreclaim {command}`; see `kvreclaim {command} "
            "--help-all`, or put it under the name of its command.",
        )
        values = value if isinstance(value, list) else [value]
        require(flags[flag] or len(values) == 1, f"{path} has several values of {name!r}, which takes one.")
        if flag in typed or off in typed:
            continue
        for each in values:
            require(
                isinstance(each, str | int | float),
                f"{path} has {name!r} {each!r}; pass a text, a number, true or false.",
            )
            if isinstance(each, bool):
                yield flag if each else off
            else:
                yield f"{flag}={each}"
