"""Maps errors of chat to this API's field names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

from kvreclaim.errors import KVReclaimError
from kvreclaim.server.base.errors import ApiError, from_engine, from_problem
from kvreclaim.server.openai.chat import ChatAnswer

OWN: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Fields of a chat request and their names in this API; the first match counts."""
OF_MESSAGE: Mapping[str, str] = {"content": "content", "tool_call_id": "call_id", "kv_drop": "kv_drop"}


@contextmanager
def own_names(places: Sequence[str] = ()) -> Iterator[None]:
    """Rename fields in errors raised in the block. places: locations of the chat's messages.

    Raises: ApiError.
    """
    try:
        yield
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        raise _renamed(from_problem(first["type"], first["loc"], first["msg"]), places) from None
    except KVReclaimError as error:
        raise _renamed(from_engine(error, ChatAnswer.route), places) from error
    except ApiError as error:
        raise _renamed(error, places) from error


def _renamed(error: ApiError, places: Sequence[str]) -> ApiError:
    return error if error.param is None else error.about(_own(error.param, places))


def _own(field: str, places: Sequence[str]) -> str:
    if found := re.match(r"messages\.(\d+)(?:\.(\w+))?", field):
        place, part = places[int(found[1])], OF_MESSAGE.get(found[2])
        return f"{place}.{part}" if part and place.startswith("input.") else place
    if found := re.match(r"tools\.\d+(\.function)\b", field):
        return field[: found.start(1)] + field[found.end(1) :]
    chat = next((name for name in OWN if field == name or field.startswith(f"{name}.")), None)
    return field if chat is None else OWN[chat] + field.removeprefix(chat)
