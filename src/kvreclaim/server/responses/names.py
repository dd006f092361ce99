"""What chat refuses, in this API's words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from pydantic import ValidationError

from kvreclaim.errors import KVReclaimError
from kvreclaim.server.errors import ApiError, from_engine, from_problem
from kvreclaim.server.openai.chat import ChatAnswer

OWN: Mapping[str, str] = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "top_logprobs",
    "tool_choice.function": "tool_choice",
    "tool_choice.allowed_tools": "tool_choice",
}
"""Fields of a chat request, and what they are called here."""
OF_MESSAGE: Mapping[str, str] = {"content": "content", "tool_call_id": "call_id", "kv_drop": "kv_drop"}
_FIELD = re.compile(
    r"(?<![\w.])(?:messages\.(?P<message>\d+)(?:\.(?P<part>\w+))?|tools\.(?P<tool>\d+)\.function|"
    r"(?P<own>max_tokens|max_completion_tokens|response_format(?:\.json_schema)?|reasoning_effort|"
    r"tool_choice\.(?:function|allowed_tools)|"
    r"^messages|^logprobs$)\b)"
)


@contextmanager
def own_names(places: Sequence[str] = ()) -> Iterator[None]:
    """Refusals of the block name this API's fields. places: what the chat's messages are called here.

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
    def name(found: re.Match[str]) -> str:
        if found["own"]:
            return OWN[found["own"]]
        if found["tool"]:
            return f"tools.{found['tool']}"
        if int(found["message"]) >= len(places):  # a client's own words
            return found[0]
        place = places[int(found["message"])]
        part = OF_MESSAGE.get(found["part"] or "")
        return f"{place}.{part}" if part and place.startswith("input.") else place

    message = _FIELD.sub(name, error.message, count=1)
    param = None if error.param is None else _FIELD.sub(name, error.param)
    return ApiError(error.status, message, param, error.code, error.headers)
