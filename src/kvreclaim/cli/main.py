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
    "run": ("run.run", "Chat with a model in the terminal."),
    "generate": ("generate.generate", "Generate from one prompt."),
    "serve": ("serve.serve", "Serve a model to OpenAI and Anthropic clients."),
    "eval": ("eval.evaluate", "Compare policies and KV formats at equal bytes."),
    "calibrate": ("calibrate.calibrate", "Measure what a model's policies need."),
    "calibrate-speed": ("calibrate_speed.calibrate_speed", "Measure step times for the simulator."),
    "fetch": ("model_names.fetch", "Download a language model."),
    "ls": ("local_models.ls", "List the models in the cache directory."),
    "rm": ("local_models.rm", "Delete a fetched model."),
    "policies": ("policies.policies", "List the compression policies."),
    "tasks": ("policies.tasks", "List the tasks of `kvreclaim eval`."),
    "plan": ("plan.plan", "Estimate memory and concurrency."),
    "simulate": ("simulate.simulate", "Simulate serving a trace."),
    "demo": ("demo.demo", "Show what compression frees and costs."),
    "bench": ("bench.bench_app", "Benchmark kernels, decoding and serving."),
}
"""Module and function of each command, or its app with commands of its own, and its line in the help text,
which imports no command."""


OTHER_COMMANDS = {
    "pull": "`kvreclaim fetch NAME` downloads a model, and so does `kvreclaim run NAME`",
    "list": "pass ls",
    "chat": "pass run",
    "show": "`kvreclaim ls` lists models, `kvreclaim plan NAME` prints sizes, /show the settings in a chat",
    **dict.fromkeys(("ps", "stop"), "a model is loaded while `kvreclaim run` or `serve` runs"),
    "create": "write a preset and pass --config FILE to `kvreclaim run`",
}
"""Commands of ollama and vLLM, and what to do instead."""


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
    module, attribute = COMMANDS[name][0].split(".")
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

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] in OTHER_COMMANDS:
            ctx.fail(f"{args[0]} is no command here; {OTHER_COMMANDS[args[0]]}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


app = CommandApp(
    cls=_Group,
    add_completion=True,
    no_args_is_help=True,
    context_settings={"help_option_names": ["--help", "-h"]},
    help="Serve language models from a paged KV cache whose compression gives blocks back.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from kvreclaim.cli.build_facts import build_facts

        typer.echo("\n".join(build_facts()))
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
