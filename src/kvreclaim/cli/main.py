"""The `kvreclaim` command."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kvreclaim.cli.help import CommandApp
from kvreclaim.cli.uncollected import uncollected
from kvreclaim.errors import printable

COMMANDS = {
    "run": "run.run",
    "generate": "generate.generate",
    "serve": "serve.serve",
    "eval": "eval.evaluate",
    "calibrate": "calibrate.calibrate",
    "calibrate-speed": "calibrate_speed.calibrate_speed",
    "fetch": "model_names.fetch",
    "ls": "local_models.ls",
    "rm": "local_models.rm",
    "policies": "policies.policies",
    "tasks": "policies.tasks",
    "plan": "plan.plan",
    "simulate": "simulate.simulate",
    "demo": "demo.demo",
    "bench": "bench.bench_app",
}
"""Module and function of each command, or its app with commands of its own."""


class CommandTable(Mapping[str, Any]):
    """Typer's commands by name, each imported at its first use."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            self._made[name] = _made(name)
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _made(name: str) -> Any:
    module, attribute = COMMANDS[name].split(".")
    with uncollected():
        found = getattr(import_module(f"kvreclaim.cli.{module}"), attribute)
    if isinstance(found, typer.Typer):
        command = typer.main.get_command(found)
        command.name = name
        return command
    alone = CommandApp()
    alone.command(name)(found)
    return typer.main.get_command(alone)


class _Group(TyperGroup):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = CommandTable()  # type: ignore[assignment]


app = CommandApp(
    cls=_Group,
    add_completion=True,
    no_args_is_help=True,
    help="Serve language models from a paged KV cache whose compression gives blocks back.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvreclaim.cli.build_facts import build_facts

        typer.echo("\n".join(build_facts().lines()))
        raise typer.Exit


class _PrintableFormatter(logging.Formatter):
    """Warnings of commands that set up no log: they may quote files and their names."""

    def format(self, record: logging.LogRecord) -> str:
        return "\n".join(map(printable, super().format(record).split("\n")))


@app.callback()
def _main(
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print version and build.",
        ),
    ] = False,
) -> None:
    """Options for every command."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_PrintableFormatter())


def main() -> None:
    """The command's process: it ends as an interpreter does, but frees nothing object by object, which with
    torch and transformers takes a second."""
    try:
        app()
    except SystemExit as ended:
        if not isinstance(ended.code, int | None):
            raise
        _leave(ended.code or 0)


def _leave(code: int) -> None:
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    except (AttributeError, OSError, ValueError):  # closed, or without a reader: the interpreter reports it
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    main()
