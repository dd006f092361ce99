"""What the request bodies of both dialects are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
)
from pydantic_core import PydanticCustomError

from kvreclaim.config import CompressionSettings, SamplingParams
from kvreclaim.options import settings_of

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


T = TypeVar("T", bound=BaseModel)


class Fields(BaseModel):
    """A JSON object of a request: values are taken as they are, unknown names are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


Plain = bool | int | float | str | None
OptionValue = Annotated[
    Plain | list[Plain | list[Plain]], described("a number, true, false, null, a text, or a list of these")
]
"""What a policy's name can say too (schedule/spec.py)."""


def mirrors(config: type, names: Iterable[str]) -> Callable[[type[T]], type[T]]:
    """Gives a body these settings of a config, None where they are left out. Their bounds are only described:
    the config refuses, in its own words."""

    def with_settings(body: type[T]) -> type[T]:
        fields: dict[str, Any] = {}
        for setting in (settings_of(config)[name] for name in names):
            bounds = {"minimum": setting.said.low, "maximum": setting.said.high}
            extra: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound is not None}
            described = Field(None, description=setting.said.help, json_schema_extra=extra)
            fields[setting.name] = (setting.type | None, described)
        return create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields
        )

    return with_settings


@mirrors(CompressionSettings, (n for n in settings_of(CompressionSettings) if n not in ("policy", "stats")))
class KVCompression(Fields):
    """CompressionConfig's fields, but for `stats`: clients name no files of the server."""

    policy: str | None = Field(None, min_length=1, max_length=MAX_POLICY_LENGTH)
    options: dict[str, OptionValue] | None = None


SAMPLING = (
    "seed",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "ignore_eos",
)
"""Settings of SamplingParams that both dialects mirror."""


@mirrors(SamplingParams, SAMPLING)
class GeneratingFields(Fields):
    """What every request that generates may say, in both dialects."""

    stream: bool | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_TOKEN_LIST)
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = 0
    kv_compression: KVCompression | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[
    StopString | StopList,
    described(f"a string or at most {MAX_STOP_STRINGS} of them, each of 1 to {MAX_STOP_LENGTH} characters"),
]
