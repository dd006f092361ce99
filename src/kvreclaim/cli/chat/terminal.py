"""A chat in the terminal: lines in, answers out."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import Event

import typer

from kvreclaim.cli.chat.commands import QUOTES, Commands, say
from kvreclaim.cli.chat.dialogue import AnswerFigures, Dialogue
from kvreclaim.cli.chat.figures import answer_rows, print_table, short_line
from kvreclaim.errors import KVReclaimError, RequestTooLongError
from kvreclaim.model_paths import history_file
from kvreclaim.parsers.pieces import Piece, Reasoning, Text

PROMPT, MORE = ">>> ", "... "
HINT = "Send a message (/? for help)"
OTHERS = dict.fromkeys(range(127, 160), 0xFFFD)
PICTURES = OTHERS | {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
"""Control characters that a model writes are shown, not obeyed."""
ReadLine = Callable[[str], str]
"""Asks for a line with this prompt. Raises: EOFError where there is no more, KeyboardInterrupt on ctrl-C."""


def line_reader(commands: Iterable[str]) -> ReadLine:
    """Lines from the keyboard, with editing, history and completion of commands."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.completion import WordCompleter
    from prompt_toolkit.formatted_text import FormattedText
    from prompt_toolkit.history import FileHistory, InMemoryHistory
    from prompt_toolkit.shortcuts import CompleteStyle

    file = history_file()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        history: FileHistory | InMemoryHistory = FileHistory(str(file))
    except OSError as error:
        say(f"lines are not kept for the next time: {str(file)!r} cannot be written ({error.strerror})")
        history = InMemoryHistory()
    session: PromptSession[str] = PromptSession(
        history=history,
        completer=WordCompleter([*commands], sentence=True),
        complete_while_typing=False,
        complete_style=CompleteStyle.READLINE_LIKE,
    )

    def read(prompt: str) -> str:
        hint = FormattedText([("fg:ansibrightblack", HINT)] if prompt == PROMPT else [])
        return session.prompt(prompt, placeholder=hint)

    return read


def read_message(read: ReadLine) -> str:
    """A line, or the lines between triple quotes, behind a command, too."""
    line = read(PROMPT)
    head, quotes, text = line.partition(QUOTES)
    if not quotes or not (head.startswith("/") or not head.strip()):
        return line
    while not text.rstrip().endswith(QUOTES):
        text += f"\n{read(MORE)}"
    return head + text.rstrip().removesuffix(QUOTES)


def converse(dialogue: Dialogue, read: ReadLine, commands: Commands) -> None:
    """Answer messages and obey commands until the user leaves."""
    while not commands.is_over:
        try:
            message = read_message(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            say("ctrl-D or /bye leaves")
            continue
        try:
            if message.startswith("/"):
                commands.obey(message)
            elif message.strip():
                answer(dialogue, message, verbose=commands.verbose)
        except KVReclaimError as error:
            remedy = " /clear begins anew." if isinstance(error, RequestTooLongError) else ""
            typer.echo(f"error: {error}{remedy}", err=True)


def answer(dialogue: Dialogue, message: str, *, verbose: bool) -> AnswerFigures:
    """Write the answer as it comes, then its figures; ctrl-C ends it.

    Raises: InvalidArgumentError, RequestTooLongError before anything has run.
    """
    with interrupted() as pressed:
        write(dialogue.ask(message, pressed.is_set))
    figures = dialogue.last
    assert figures is not None, "an answer has figures"
    if figures.error is not None:
        typer.echo(f"error: {figures.error}", err=True)
    elif verbose:
        print_table(answer_rows(figures))
    else:
        say(short_line(figures))
    return figures


def write(pieces: Iterable[Piece]) -> None:
    """Text to standard output, reasoning dimmed to standard error; each ends with a line."""
    last: type[Piece] | None = None
    for piece in pieces:
        if not isinstance(piece, (Text, Reasoning)):
            continue
        is_thought = isinstance(piece, Reasoning)
        if last is Reasoning and not is_thought:
            typer.echo("\n", err=True)
        typer.secho(_shown(piece.text, is_thought), nl=False, err=is_thought, dim=is_thought or None)
        last = type(piece)
    typer.echo(err=last is Reasoning)


def _shown(text: str, is_thought: bool) -> str:
    out = sys.stderr if is_thought else sys.stdout
    return text.translate(PICTURES) if out.isatty() else text


@contextmanager
def interrupted() -> Iterator[Event]:
    """Set by ctrl-C, which interrupts nothing meanwhile: a step of the engine is never left half done."""
    pressed = Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
