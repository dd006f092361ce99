"""Help texts: every name whole at any width, options by panel, and the rare panels behind --help-all."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from kvreclaim.cli.config_file import FLAG, with_file
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import FIRST

ARGUMENTS, NAMES_WIDTH = "Arguments", 24
"""The panel of arguments; columns of the names (a longer name has a line of its own)."""


DEVICE = "a model runs on one device as a whole: pass --device cuda or --device cpu"
FORMAT = "pass --kv-cache-dtype, such as int8 or int8+int4 (keys first)"
ALWAYS = "remove it: this is always so"
ONE_DEVICE = "this engine uses one device; vLLM with the plugin shards"
LOCKED = "remove it: packed weights are mapped from a file, and all others are read into memory"
OTHER_NAMES = {
    **dict.fromkeys(("-ngl", "--n-gpu-layers", "--gpu-layers", "--num-gpu"), DEVICE),
    **dict.fromkeys(("--ctx-size", "--n-ctx", "--num-ctx"), "pass --max-model-len"),
    **dict.fromkeys(("-ctk", "--cache-type-k", "-ctv", "--cache-type-v"), FORMAT),
    **dict.fromkeys(("-fa", "--flash-attn", "--jinja", "--mmap", "-cb", "--cont-batching"), ALWAYS),
    **dict.fromkeys(("-cnv", "--conversation", "-i", "--interactive", "--color", "--simple-io"), ALWAYS),
    **dict.fromkeys(("--enable-auto-tool-choice", "--enable-chunked-prefill"), ALWAYS),
    **dict.fromkeys(("--no-mmap", "--mlock"), LOCKED),
    **dict.fromkeys(("-f", "--file"), "pass the file as standard input: < FILE"),
    **dict.fromkeys(("-sys", "--system-prompt"), "pass --system to `kvreclaim run`"),
    **dict.fromkeys(("--format", "--json-schema"), "send response_format to `kvreclaim serve`"),
    **dict.fromkeys(("-np", "--parallel"), "pass --max-num-seqs"),
    **dict.fromkeys(("-ub", "--ubatch-size", "-b", "--batch-size"), "pass --max-num-batched-tokens"),
    **dict.fromkeys(("-tb", "--threads-batch"), "pass --threads"),
    **dict.fromkeys(("-hf", "--hf-repo"), "pass --model owner/name-GGUF:Q4_K_M"),
    **dict.fromkeys(("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size"), ONE_DEVICE),
    **dict.fromkeys(("-dp", "--data-parallel-size"), "start one server for each"),
    **dict.fromkeys(("--lora", "--enable-lora"), "adapters run in vLLM with the plugin"),
    **dict.fromkeys(("-q", "--quantization"), "remove it: the model's files name their method"),
    **dict.fromkeys(("--press", "--press-name"), "pass --policies"),
    **dict.fromkeys(("--dataset", "--data-dir"), "pass --tasks and --num-tokens"),
    **dict.fromkeys(("-a", "--alias"), "pass --served-model-name"),
    **dict.fromkeys(("--n-predict", "--predict", "--num-predict"), "pass --max-tokens"),
    "--temp": "pass --temperature",
    "--repeat-penalty": "pass --repetition-penalty",
    "--gpu-memory-utilization": "pass --kv-memory-fraction, the share of free memory for blocks",
    "--compression-ratio": "pass --budgets, the share that stays: 1 - ratio",
    "--kv-budget": "pass --budgets to `kvreclaim eval`, --compression to `plan` and `simulate`",
    "--kv-compression": "pass --policies to `kvreclaim eval`, --compression to `plan` and `simulate`",
    "--hidethinking": "reasoning goes to standard error; 2> /dev/null hides it",
    "--keepalive": "remove it: the model stays loaded until the command ends",
    "--trust-remote-code": "remove it: code of a model's files never runs",
    "--disable-log-requests": "remove it: without --log-prompts the log holds no text",
    "--grammar-file": "pass a grammar with each request (structured_outputs)",
}
"""Options of llama.cpp, ollama, vLLM and kvpress, and what to pass instead."""


class CommandApp(typer.Typer):
    """A typer app with plain help texts, for commands of this module."""

    def __init__(self, **settings: Any) -> None:
        plain = {"add_completion": False, "rich_markup_mode": None, "pretty_exceptions_enable": False}
        super().__init__(**plain | settings)

    def command(self, name: str | None = None, **settings: Any) -> Any:
        return super().command(name, **{"cls": PagedCommand} | settings)


class PagedCommand(TyperCommand):
    """A command with panels of options. If it has --help-all, --help shows its first panel alone, of each
    option the first sentence of its help and its default."""

    @property
    def takes_model(self) -> bool:
        """Whether the first word may be the model: the command has --model and no arguments."""
        names = {name for each in self.params for name in each.opts}
        return "--model" in names and all(each.param_type_name == "option" for each in self.params)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), *(["[MODEL]"] if self.takes_model else [])]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read --config's file, take a first word as --model, and refuse options of other engines with what
        stands for them here."""
        own = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        with_value = {
            flag for each in self.params if not getattr(each, "is_flag", True) for flag in each.opts
        }
        words = args[: args.index("--")] if "--" in args else args
        for before, each in pairwise(["", *words]):
            name = each.partition("=")[0]
            name = name.replace("_", "-") if name.startswith("--") else name
            if name in OTHER_NAMES and name not in own and before not in with_value:
                ctx.fail(f"{name} is no option here; {OTHER_NAMES[name]}.")
        if self.takes_model and args and not args[0].startswith("-"):
            if any(each.partition("=")[0] in ("--model", "-m") for each in words):
                ctx.fail(f"the model is named twice, first as {args[0]!r}; leave out --model.")
            args = ["--model", *args]
        if FLAG in own:
            flags = {flag: each.multiple or each.nargs != 1 for each in self.params for flag in each.opts}
            try:
                commands = ctx.parent.command.commands if ctx.parent is not None else (ctx.info_name,)
                args = with_file(args, str(ctx.info_name), commands, flags)
            except InvalidArgumentError as error:
                ctx.fail(str(error))
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the panels in the order of their first options, arguments and frequent options first."""
        is_short = any(each.name == HELP_ALL for each in self.params) and not ctx.meta.get(HELP_ALL)
        panels: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], FIRST: []}
        for each in self.get_params(ctx):
            is_option = each.param_type_name == "option"
            panel = (getattr(each, "rich_help_panel", None) or FIRST) if is_option else ARGUMENTS
            if (record := each.get_help_record(ctx)) is not None:
                panels.setdefault(panel, []).append((record[0].replace("<list[str]>", "<str>"), record[1]))
        for panel, rows in panels.items():
            if not rows or (is_short and panel not in (ARGUMENTS, FIRST)):
                continue
            with formatter.section(panel):
                shown = [(name, in_short(text)) for name, text in rows] if is_short else rows
                formatter.write_dl(shown, col_max=NAMES_WIDTH)


def in_short(text: str) -> str:
    """The first sentence of a help text, and its default."""
    first, *others = re.split(r"(?<=\.) +(?=[A-Z\[])", text)
    return " ".join([first, *(each for each in others if each.startswith(("Default:", "[")))])


def _show_all(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        ctx.meta[HELP_ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit


HELP_ALL = "help_all"
HelpAll = Annotated[
    bool,
    typer.Option("--help-all", is_eager=True, callback=_show_all, help="Show all options and exit."),
]
