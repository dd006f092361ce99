"""Commands of a chat, which begin with /."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from kvreclaim.checks import require
from kvreclaim.cli.chat.dialogue import Dialogue
from kvreclaim.cli.chat.figures import print_table, sampling_rows, show_rows
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import Setting, settings_of
from kvreclaim.outputs import write_json
from kvreclaim.sampling_params import SamplingParams

QUOTES = '"""'
ROLES = ("system", "user", "assistant")
ALIASES = {"/?": "/help", "/exit": "/bye"}
OLLAMA_OPTIONS = {
    "num_ctx": "start with --max-model-len",
    "num_predict": "write max_tokens",
    "repeat_penalty": "write repetition_penalty",
}
"""Options of ollama, and what to do here."""


def say(line: str) -> None:
    """A line for the user, apart from the answers."""
    typer.secho(line, err=True, dim=True)


@dataclass(frozen=True, slots=True)
class Command:
    """usage: its arguments; run: is given what stands behind its name"""

    usage: str
    help: str
    run: Callable[[str], None]


class Commands:
    """Commands of one chat.

    verbose: all figures follow each answer, not a line
    is_over: the user leaves
    """

    def __init__(self, dialogue: Dialogue, *, verbose: bool = False) -> None:
        self.dialogue, self.verbose, self.is_over = dialogue, verbose, False
        self.known = {
            "/help": Command("", "this list", self._help),
            "/clear": Command("", "forget the conversation; the system prompt stays", self._clear),
            "/system": Command("TEXT", "set the system prompt; without TEXT, show it", self._system),
            "/set": Command(
                "NAME VALUE", "set a sampling option, or verbose or quiet; alone: list", self._set
            ),
            "/show": Command("[info]", "model, cache, compression, blocks held and freed", self._show),
            "/save": Command("FILE", "write the conversation to a JSON file", self._save),
            "/load": Command("FILE", "go on from such a file", self._load),
            "/bye": Command("", "leave, as ctrl-D does", self._bye),
        }

    def obey(self, line: str) -> None:
        """Run a line that begins with /. Raises: InvalidArgumentError."""
        name, _, rest = line.strip().partition(" ")
        name = ALIASES.get(name, name)
        require(
            name in self.known,
            f"{name!r} is no command; /help lists them (a message may begin with {QUOTES}).",
        )
        command, rest = self.known[name], rest.strip()
        require(bool(command.usage) or not rest, f"{name} takes nothing, and got {rest!r}; leave it out.")
        command.run(rest)

    def _help(self, _: str) -> None:
        print_table((f"{name} {each.usage}", each.help) for name, each in self.known.items())
        say(f"{QUOTES} begins and ends a message of several lines; ctrl-C ends an answer, ctrl-D leaves")

    def _clear(self, _: str) -> None:
        self.dialogue.clear()
        say("the conversation is forgotten")

    def _system(self, text: str) -> None:
        if text:
            self.dialogue.system = text
        say(f"system prompt: {self.dialogue.system or 'none'}")

    def _set(self, rest: str) -> None:
        name, _, value = rest.removeprefix("parameter ").strip().partition(" ")
        if name in ("verbose", "quiet") and not value:
            self.verbose = name == "verbose"
        elif name == "system":
            self._system(value.strip())
        elif rest:
            self._set_sampling(name, value.strip())
        else:
            print_table(sampling_rows(self.dialogue.params, all_=True))

    def _set_sampling(self, name: str, text: str) -> None:
        known = {key: each for key, each in settings_of(SamplingParams).items() if each.spec.help}
        require(name in known, f"{name!r} is no option; {OLLAMA_OPTIONS.get(name, '/set lists them')}.")
        require(bool(text), f"{name} has no value; write /set {name} VALUE.", name)
        value = _value(known[name], text)
        self.dialogue.params = replace(self.dialogue.params, **{name: value})
        say(f"{name}: {value}")

    def _show(self, what: str) -> None:
        require(what in ("", "info"), f"/show takes nothing or info, and got {what!r}; leave it out.")
        print_table(show_rows(self.dialogue))

    def _save(self, name: str) -> None:
        require(bool(name), "/save has no file; write /save FILE.")
        write_json(Path(name), {"messages": self.dialogue.messages})
        say(f"{len(self.dialogue.turns)} messages are in {name}")

    def _load(self, name: str) -> None:
        require(bool(name), "/load has no file; write /load FILE.")
        messages = read_messages(Path(name))
        self.dialogue.clear()
        if messages and messages[0]["role"] == "system":
            self.dialogue.system = messages.pop(0)["content"]
        self.dialogue.turns = messages
        say(f"{len(messages)} messages come from {name}")

    def _bye(self, _: str) -> None:
        self.is_over = True


def _value(setting: Setting, text: str) -> Any:
    """The value that a text stands for; what is none goes to the option's own check."""
    if setting.optional and text.lower() in ("none", "null"):
        return None
    if setting.type is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    if setting.type not in (int, float):
        return [text]
    try:
        return setting.type(text)
    except ValueError:
        return text


def read_messages(file: Path) -> list[dict[str, Any]]:
    """The messages of a saved conversation. Raises: InvalidArgumentError."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["messages"]
        fits = all(each["role"] in ROLES and isinstance(each["content"], str) for each in found)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidArgumentError(
            f"{str(file)!r} cannot be read as a conversation ({type(error).__name__}); name a file that "
            "/save has written."
        ) from error
    require(fits, f"{str(file)!r} has messages of other roles or kinds; name a file that /save has written.")
    return list(found)
