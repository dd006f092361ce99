"""What the request bodies of both dialects are made of."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
)
from pydantic_core import PydanticCustomError

MAX_POLICY_LENGTH = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOKEN_LIST = 1024
"""Of token ids that each new token is compared with."""


def refusal(sentence: str) -> PydanticCustomError:
    """A validator's complaint about its field, without a full stop."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def described(what: str) -> WrapValidator:
    """One sentence for a union's refusal, instead of one for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise refusal(f"it must be {what}") from None

    return WrapValidator(validate)


class Fields(BaseModel):
    """A JSON object of a request: values are taken as they are, unknown names are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


Plain = bool | int | float | str | None
OptionValue = Annotated[
    Plain | list[Plain | list[Plain]], described("a number, true, false, null, a text, or a list of these")
]
"""What a policy's name can say too (compression/spec.py)."""


class KVCompression(Fields):
    """CompressionConfig's fields, but for `stats`: clients name no files of the server."""

    policy: str | None = Field(None, min_length=1, max_length=MAX_POLICY_LENGTH)
    budget: int | None = None
    interval: int | None = None
    sinks: int | None = None
    recent: int | None = None
    protect_prompt: bool | None = None
    mode: str | None = None
    options: dict[str, OptionValue] | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[
    StopString | StopList,
    described(f"a string or at most {MAX_STOP_STRINGS} of them, each of 1 to {MAX_STOP_LENGTH} characters"),
]
