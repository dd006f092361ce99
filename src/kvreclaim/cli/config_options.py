"""Options of a command from the fields of the configs that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field
from typing import Annotated, Any, get_args, get_origin

import typer

from kvreclaim.checks import require
from kvreclaim.cli.config_file import CONFIG_FILE, ConfigFile
from kvreclaim.cli.help import HELP_ALL, HelpAll
from kvreclaim.compression_settings import parse_budget
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.options import Setting, settings_of

MANY = 60
"""Options beyond which a command has --help-all, and --help shows the frequent ones alone."""


@dataclass(frozen=True, kw_only=True)
class ConfigOptions:
    """Metadata of a parameter in Annotated: the options of a config.

    config:   class of the fields
    panel:    of the help text; None: the command's own
    only:     these fields; empty: all with a help text
    without:  excluded fields
    defaults: defaults of this command that differ from the config's
    unset:    no default is shown or passed on, so fields without an option are missing
    own_names: flags are the fields' names, whatever flags they have elsewhere
    build:    makes the parameter of the fields with a value; None: the config
    """

    config: type
    panel: str | None = None
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    unset: bool = False
    own_names: bool = False
    build: Callable[..., Any] | None = None

    def settings(self) -> list[Setting]:
        known = settings_of(self.config)
        unknown = {*self.only, *self.without, *self.defaults} - {*known}
        assert not unknown, f"{self.config.__name__} has no option {unknown}"
        names = self.only or [name for name in known if known[name].spec.help]
        return [known[name] for name in names if name not in self.without]

    def flags(self, setting: Setting) -> tuple[str, ...]:
        return (not self.own_names and setting.spec.flags) or (f"--{setting.name.replace('_', '-')}",)

    def parameter(self, name: str, setting: Setting) -> inspect.Parameter:
        """Return typer's option. name: of the parameter that it belongs to."""
        spec, kind = setting.spec, setting.spec.typed_as or setting.type
        default = self.defaults.get(setting.name, setting.default)
        flags = self.flags(setting)
        if default is MISSING:
            default = inspect.Parameter.empty
        elif kind is bool:
            plain = flags[0]
            flags = (f"{plain}/--no-{plain[2:]}",) if default or setting.optional else (plain,)
            kind = bool | None if setting.optional else bool
            if self.unset and default:
                kind, default = bool | None, None
        elif spec.typed_as is None and _several(setting):
            kind, default = str, ",".join(map(str, default))
        elif self.unset or default in (None, ()):
            kind, default = kind | None, None
        info = typer.Option(*flags, help=spec.help, envvar=spec.env, rich_help_panel=spec.panel or self.panel)
        return inspect.Parameter(
            f"{name}_{setting.name}",
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[kind, info],
        )

    def value(self, name: str, given: dict[str, Any]) -> Any:
        """The parameter's value; its options are taken out of what was given. Raises: KVReclaimError."""
        known = {setting.name: setting for setting in self.settings()}
        values = {key: self._read(setting, given.pop(f"{name}_{key}")) for key, setting in known.items()}
        present = {
            key: value
            for key, value in values.items()
            if value is not None and not (self.unset and value is False and known[key].default is not True)
        }
        return (self.build or self.config)(**present)

    def _read(self, setting: Setting, value: Any) -> Any:
        """Several values are a list, or one text with commas; where a text may stand for a number, what reads
        as one is one."""
        if setting.spec.also and isinstance(value, str):
            return int(value) if value.lstrip("-").isdecimal() else value
        if not _several(setting) or value is None:
            return value
        if isinstance(value, str):
            kind, flag = get_args(setting.type)[0], self.flags(setting)[0]
            value = names_in(value) if kind is str else numbers_in(flag, value, kind)
        return tuple(value)


def _several(setting: Setting) -> bool:
    return get_origin(setting.type) in (tuple, Sequence)


def with_config(function: Callable[..., None]) -> Callable[..., None]:
    """Make a typer command with the options of every parameter with ConfigOptions in its annotation. The
    function gets the built values, and a caller's mistake is printed as one sentence."""
    parameters: list[inspect.Parameter] = []
    groups: dict[str, ConfigOptions] = {}
    for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
        marks = [mark for mark in get_args(parameter.annotation) if isinstance(mark, ConfigOptions)]
        if marks:
            [groups[name]] = marks
            parameters += [marks[0].parameter(name, setting) for setting in marks[0].settings()]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    if len(parameters) > MANY:
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(CONFIG_FILE, kind, default=None, annotation=ConfigFile))
        parameters.append(inspect.Parameter(HELP_ALL, kind, default=False, annotation=HelpAll))

    def command(**given: Any) -> None:
        for name in (CONFIG_FILE, HELP_ALL):
            given.pop(name, None)
        with usage_errors():
            built = {name: group.value(name, given) for name, group in groups.items()}
            function(**given, **built)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


@contextmanager
def usage_errors() -> Iterator[None]:
    """Print one sentence and exit with 2 instead of a traceback."""
    try:
        yield
    except KVReclaimError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


def numbers_in(flag: str, value: str, kind: type[int] | type[float]) -> list[int | float]:
    """Comma-separated numbers; floats may be shares in per cent. Raises: InvalidArgumentError."""
    try:
        return [
            kind(part) if kind is int or not part.endswith("%") else parse_budget(part)
            for part in names_in(value)
        ]
    except InvalidArgumentError:
        raise
    except ValueError as error:
        example = "1024,8192" if kind is int else "0.5,0.25"
        raise InvalidArgumentError(
            f"{flag} is {value!r}, which is no list of numbers; pass, for example, {example}."
        ) from error


def names_in(value: str) -> list[str]:
    """Comma-separated names; commas inside parentheses do not count: "a,b(c,d)" -> ["a", "b(c,d)"].

    Raises: InvalidArgumentError where parentheses do not match.
    """
    parts, depth = [""], 0
    for char in value:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    require(depth == 0, f"{value!r} has parentheses that do not match; write, for example, a,b(c,d).")
    return [part.strip() for part in parts if part.strip()]
