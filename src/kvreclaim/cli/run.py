"""`kvreclaim run`: chat with a model in the terminal."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreclaim.checks import require
from kvreclaim.cli import options as opt
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.generate import OF_MANY
from kvreclaim.cli.model_names import model_of
from kvreclaim.config import EngineConfig
from kvreclaim.errors import InvalidArgumentError, KVReclaimError
from kvreclaim.sampling_params import SamplingParams

if TYPE_CHECKING:
    from kvreclaim import LLM, CompressionConfig
    from kvreclaim.cli.chat.dialogue import Dialogue

OLLAMA = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
"""Its sampling; as there, an answer has as many tokens as fit."""


def _sampling(**given: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": None, **given})


@with_config
def run(
    model: Annotated[
        str | None,
        typer.Argument(
            help=f"A name that `kvreclaim ls` prints, a directory, a .gguf file, a hub id, a "
            f"GGUF file of the hub (owner/name:Q4_K_M), or {opt.DEMO}. "
            "Default: as for `kvreclaim serve`."
        ),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Argument(help="A message to answer once; without it, a chat begins.")
    ] = None,
    *,
    named: Annotated[
        str | None, typer.Option("--model", "-m", help="Same as MODEL; the arguments are then the PROMPT.")
    ] = None,
    message: Annotated[str | None, typer.Option("--prompt", "-p", help="Same as PROMPT.")] = None,
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    verbose: Annotated[bool, typer.Option("--verbose", help="Print all figures after each answer.")] = False,
    engine: Annotated[
        EngineConfig,
        ConfigOptions(
            config=EngineConfig, without=OF_MANY, defaults={"conversation_snapshots": True, **opt.THREADS}
        ),
    ],
    params: Annotated[
        SamplingParams,
        ConfigOptions(
            config=SamplingParams,
            panel=opt.SAMPLING,
            without=("n",),
            defaults={**OLLAMA, "max_tokens": None},
            build=_sampling,
        ),
    ],
    compression: Annotated[Any, opt.Compression],
    calibrate: opt.Calibrate = False,
    dtype: opt.DType = "auto",
    device: opt.Device = "auto",
) -> None:
    """Chat with a model in the terminal, or answer once what is piped in. Answers go to standard output,
    reasoning and figures to standard error. Where statistics exist, compression is auto; `--kv-compression
    full` keeps every token."""
    words = prompt or []
    if named is not None:
        model, words = named, [model, *words] if model is not None else words
    require(not (message and words), "the prompt is given twice; leave out --prompt.", "prompt")
    path = model_of(model, fetches=True)
    text = text_to_answer(message or " ".join(words))
    with opt.starting(calibrate):
        from kvreclaim import LLM
        from kvreclaim.cli.chat.dialogue import Dialogue
        from kvreclaim.model.loader import hide_progress_bars

        hide_progress_bars()
        chosen, at_start = opt.with_calibration(compression, calibrate)
        given = asdict(engine) | {"max_num_seqs": 1, "calibrate": at_start, "compression": chosen}
        started = LLM(path, dtype=dtype, device=device, **given)
    with closing(started) as llm:
        dialogue = Dialogue(llm, params, compression_for(llm), system)
        if dialogue.is_plain:
            opt.tell(f"{llm.loaded.name} has no chat template: it continues your text")
        if text:
            answer_once(dialogue, text, verbose=verbose)
        else:
            chat(dialogue, verbose=verbose)


def text_to_answer(prompt: str) -> str:
    """What is piped in, then the prompt; empty: a chat. Raises: InvalidArgumentError if neither is there and
    there is no terminal to chat in."""
    if is_terminal(sys.stdin):
        require(
            bool(prompt) or is_terminal(sys.stdout),
            "standard output is no terminal to chat in; pass a PROMPT, or text on standard input.",
            "prompt",
        )
        return prompt
    text = "\n".join(part for part in (piped_text().strip(), prompt) if part)
    require(bool(text), "standard input is empty and no PROMPT is given; pass one of them.", "prompt")
    return text


def is_terminal(stream: Any) -> bool:
    return bool(stream.isatty())


def piped_text() -> str:
    """Standard input. Raises: InvalidArgumentError if it is no text."""
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"standard input is no {error.encoding} text ({error.reason} at byte {error.start}); pass text."
        ) from error


def compression_for(llm: LLM) -> CompressionConfig | None:
    """The compression that was given, else auto where there are statistics. Prints it in one line."""
    from kvreclaim import CompressionConfig

    if llm.compression is not None:
        opt.tell(opt.compression_line(llm, llm.compression))
        return llm.compression
    try:
        require(
            llm.stats_file.is_file(),
            f"{llm.loaded.name} has no statistics; `kvreclaim calibrate` or --kv-compression-calibrate makes "
            "them.",
        )
        config = llm.resolved(CompressionConfig())
        llm.compressor(config)
        opt.tell(f"compression: {config.in_words}; --kv-compression full keeps every token")
    except KVReclaimError as error:
        typer.echo(f"no compression: {error}", err=True)
        return None
    return config


def answer_once(dialogue: Dialogue, message: str, *, verbose: bool) -> None:
    from kvreclaim.cli.chat.terminal import answer

    figures = answer(dialogue, message, verbose=verbose)
    if figures.error is not None or figures.finish_reason == "abort":
        raise typer.Exit(1 if figures.error is not None else 130)


def chat(dialogue: Dialogue, *, verbose: bool) -> None:
    from kvreclaim.cli.chat.commands import Commands
    from kvreclaim.cli.chat.terminal import converse, line_reader

    commands = Commands(dialogue, verbose=verbose)
    converse(dialogue, line_reader(commands.known), commands)
