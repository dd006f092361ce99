"""What a client does with a server: a row of the table that `make clients` prints.

python tests/clients/MODULE.py URL MODEL TOKENIZER   # the rows of a module, one JSON object a line
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city.", "parameters": WEATHER},
}
SAY: list[dict[str, Any]] = [{"role": "user", "content": "Name a city."}]
ENVIRONMENT = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENAI_API_KEY": "any"}


class City(BaseModel):
    """A city."""

    city: Literal["Bern", "Paris"]


@dataclass(frozen=True)
class At:
    """A server. url: without /v1; tokenizer: a directory, for clients that count tokens themselves"""

    url: str
    model: str
    tokenizer: str = ""

    @property
    def v1(self) -> str:
        return f"{self.url}/v1"


@dataclass(frozen=True)
class Row:
    client: str
    what: str
    work: Callable[[At], object]


class Rows(list[Row]):
    """The rows of one client, or of several."""

    def add(self, client: str, what: str) -> Callable[[Callable[[At], object]], Callable[[At], object]]:
        def decorate(work: Callable[[At], object]) -> Callable[[At], object]:
            self.append(Row(client, what, work))
            return work

        return decorate

    def main(self) -> None:
        os.environ.update(ENVIRONMENT)
        at = At(*sys.argv[1:])
        for row in self:
            print(json.dumps([row.client, row.what, answered(row, at)]), flush=True)


def answered(row: Row, at: At) -> str:
    """`ok`, with figures if the row has some, or the message of the server's or the client's error."""
    try:
        figures = row.work(at)
    except BaseException as error:
        return message_of(error)
    return f"ok: {figures}" if figures else "ok"


def message_of(error: BaseException) -> str:
    """The server's own sentence, if the error has one."""
    text = " ".join(str(error).split())
    sentence = re.search(r"""["']message["']: (?:"(.*?)"|'(.*?)')[,}]""", text)
    if sentence:
        return next(filter(None, sentence.groups()))[:300]
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text[:240]} ({place.name}:{place.lineno})"


def check(holds: object, what: object) -> None:
    """Raise AssertionError with what was seen unless this holds."""
    if not holds:
        raise AssertionError(f"{what!r}"[:200])


def check_text(whole: str | None, parts: Iterable[str | None]) -> None:
    """The answer has text, and streamed (both greedy) it is the same text."""
    streamed = "".join(part or "" for part in parts)
    check(whole and streamed == whole, (whole, streamed))
