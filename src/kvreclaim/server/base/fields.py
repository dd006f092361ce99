"""Common fields of the bodies of both dialects: of requests, with those of the features
(kvreclaim/engine/features/), and the usage in answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    create_model,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

from kvreclaim.compression_settings import FULL, CompressionSettings
from kvreclaim.engine.features import FEATURES
from kvreclaim.engine.request.outputs import RequestMetrics
from kvreclaim.options import settings_of
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.config import MAX_INT32

T = TypeVar("T", bound=BaseModel)
FIELDS = {feature: tuple(names) for feature in FEATURES if (names := feature.http_fields())}
"""Features with fields in HTTP bodies, and the names of these."""
MAX_POLICY_LENGTH = 1024
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_TOKEN_LIST = 1024
"""Longest list of token ids that every new token is compared with."""
MAX_BAD_WORDS = 128
MAX_TOOLS = 1024
"""Most tool definitions, or calls of one message."""
MAX_BLOCKS = 4096
"""Most blocks of a system prompt or of a tool result."""
MAX_OPTIONS = 64
"""Most options of a policy, and most entries of an option that is a list."""
OWN_FIELDS = ("policy", "stats", "budget")
"""Fields of CompressionSettings that the body declares itself, or that clients cannot set."""
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
"""Settings of SamplingParams that both dialects share."""


def feature_fields() -> Iterator[str]:
    """Names of all features' fields."""
    return (name for names in FIELDS.values() for name in names)


def with_features(body: type[T]) -> type[T]:
    """Add the fields of all features to a body."""
    found: dict[str, Any] = {}
    for feature in FEATURES:
        found |= feature.http_fields()
    return create_model(
        body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **found
    )


def with_usage(schema: type[T]) -> type[T]:
    """Add the figures of all features to the schema of usage.kv_cache."""
    found: dict[str, Any] = {name: (int, ...) for feature in FEATURES for name in feature.usage}
    return create_model(
        schema.__name__, __base__=schema, __module__=schema.__module__, __doc__=schema.__doc__, **found
    )


def http_options(body: BaseModel) -> dict[type, Any]:
    """The options in a body, by their types. Raises: InvalidArgumentError."""
    found: dict[type, Any] = {}
    for feature, names in FIELDS.items():
        given = {name: value for name in names if (value := getattr(body, name)) is not None}
        if given:
            found[feature.option] = feature.option_of(given)
    return found


def refusal(sentence: str) -> PydanticCustomError:
    """Make a validator's error about its field, without a full stop."""
    return PydanticCustomError("refused", "{sentence}", {"sentence": sentence})


def described(what: str) -> WrapValidator:
    """Replace a union's errors, one per member, by one sentence."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise refusal(f"it must be {what}") from None

    return WrapValidator(validate)


def at_most(limit: int) -> BeforeValidator:
    """Refuse a mapping with too many entries before any is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise refusal(f"it has {len(value)} entries, at most {limit} are allowed")
        return value

    return BeforeValidator(check)


Item = TypeVar("Item")

Listed = Annotated[list[Item], Field(fail_fast=True)]
"""Every list of a request: refused at the first invalid element."""


class Fields(BaseModel):
    """A JSON object of a request: values are not coerced, the first unknown name is refused, and null means
    absent."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        known = cls.__pydantic_fields__
        if isinstance(value, dict) and not value.keys() <= known.keys():
            value = {name: given for name, given in value.items() if name in known or given is not None}
            unknown = next((name for name in value if name not in known), None)
            if unknown is None:
                return value
            problem = InitErrorDetails(type="extra_forbidden", loc=(unknown,), input=None)
            raise ValidationError.from_exception_data(cls.__name__, [problem])
        return value


Plain = bool | int | float | str | None
PlainList = Annotated[
    list[Plain | Annotated[list[Plain], Field(max_length=MAX_OPTIONS, fail_fast=True)]],
    Field(max_length=MAX_OPTIONS, fail_fast=True),
]
OptionValue = Annotated[
    Plain | PlainList, described("a number, true, false, null, a text, or a short list of these")
]
"""Values that a policy's text can have, too (compression/spec/grammar.py)."""


def mirrors(config: type, names: Iterable[str]) -> Callable[[type[T]], type[T]]:
    """Add settings of a config to a body, None where absent. Bounds are only documented here; the config
    enforces them."""

    def with_settings(body: type[T]) -> type[T]:
        fields: dict[str, Any] = {}
        for setting in (settings_of(config)[name] for name in names):
            bounds = {"minimum": setting.spec.low, "maximum": setting.spec.high}
            extra: dict[str, Any] = {key: bound for key, bound in bounds.items() if bound is not None}
            described = Field(None, description=setting.spec.help, json_schema_extra=extra)
            also = Literal[setting.spec.also] if setting.spec.also else None
            fields[setting.name] = (setting.type | also | None, described)
        return create_model(
            body.__name__, __base__=body, __module__=body.__module__, __doc__=body.__doc__, **fields
        )

    return with_settings


@mirrors(CompressionSettings, (n for n in settings_of(CompressionSettings) if n not in OWN_FIELDS))
class KVCompression(Fields):
    """CompressionConfig's fields except `stats`: clients cannot name files of the server."""

    policy: str | None = Field(None, min_length=1, max_length=MAX_POLICY_LENGTH)
    budget: Annotated[
        int | float | Annotated[str, Field(max_length=32)] | None,
        Field(description=settings_of(CompressionSettings)["budget"].spec.help),
        described('a number of tokens, a share of the prompt\'s bytes such as 0.2 or "20%", or "auto"'),
    ] = None
    options: Annotated[dict[str, OptionValue], at_most(MAX_OPTIONS)] | None = None


def _as_settings(value: Any) -> Any:
    """Read a string as the policy's name, and "off" as the full cache."""
    return {"policy": FULL if value == "off" else value} if isinstance(value, str) else value


PolicyOrSettings = Annotated[
    KVCompression, BeforeValidator(_as_settings, json_schema_input_type=str | KVCompression)
]
LogitBias = Annotated[
    dict[str, float], at_most(MAX_TOKEN_LIST), Field(json_schema_extra={"maxProperties": MAX_TOKEN_LIST})
]


@with_features
@mirrors(SamplingParams, SAMPLING)
class GeneratingFields(Fields):
    """Fields of every generating request, in both dialects."""

    stream: bool | None = None
    logit_bias: LogitBias | None = None
    cache_salt: str | None = Field(None, min_length=1)
    priority: int = Field(0, ge=-MAX_INT32 - 1, le=MAX_INT32)
    kv_compression: PolicyOrSettings | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
StopList = Annotated[Listed[StopString], Field(max_length=MAX_STOP_STRINGS)]
StopStrings = Annotated[
    StopString | StopList,
    described(f"a string or at most {MAX_STOP_STRINGS} of them, each of 1 to {MAX_STOP_LENGTH} characters"),
]
BadWords = Annotated[Listed[StopString], Field(max_length=MAX_BAD_WORDS)]


def kv_cache_usage(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Sum tokens and blocks over a request's prompts; peak_blocks is the maximum over outputs. policy,
    budget, sinks: None without compression. reclaim_efficiency: freed blocks per freeable block; None if none
    could be freed."""
    perfect = sum(m.blocks_perfect for m in metrics)
    freed = sum(m.blocks_freed for m in metrics)
    return {
        "policy": metrics[0].policy,
        "budget": metrics[0].budget,
        "sinks": metrics[0].sinks,
        "tokens_evicted": sum(m.tokens_evicted for m in metrics),
        "blocks_freed": freed,
        "peak_blocks": max(m.peak_blocks for m in metrics),
        "final_blocks": sum(m.final_blocks for m in metrics),
        "reclaim_efficiency": freed / perfect if perfect else None,
    } | {name: sum(map(figure, metrics)) for feature in FEATURES for name, figure in feature.usage.items()}


def usage_of(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Sum OpenAI's counts and the KV cache figures over a request's prompts."""
    usage = token_usage(metrics, sum(m.num_generated_tokens for m in metrics))
    if (reasoning := reasoning_tokens(metrics)) is not None:
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return {**usage, "kv_cache": kv_cache_usage(metrics)}


def reasoning_tokens(metrics: Sequence[RequestMetrics]) -> int | None:
    """Generated reasoning tokens; None without a reasoning parser."""
    found = [m.num_reasoning_tokens for m in metrics if m.num_reasoning_tokens is not None]
    return sum(found) if found else None


def token_usage(metrics: Sequence[RequestMetrics], num_generated: int) -> dict[str, Any]:
    num_prompt = sum(m.num_prompt_tokens for m in metrics)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": _cached(metrics),
    }


def _cached(metrics: Sequence[RequestMetrics]) -> dict[str, Any]:
    """Prompt tokens that were not computed; of these, those of snapshots; by tier, if any came from host or
    disk."""
    cached = sum(m.num_cached_tokens for m in metrics)
    loaded, disk = sum(m.num_loaded_tokens for m in metrics), sum(m.num_disk_tokens for m in metrics)
    found = {"cached_tokens": cached, "snapshot_tokens": sum(m.num_snapshot_tokens for m in metrics)}
    if not loaded:
        return found
    by_tier = {"device": cached - loaded, "host": loaded - disk, "disk": disk}
    return {**found, "cached_tokens_by_tier": by_tier}


Responses = dict[int | str, dict[str, Any]]


class ResponseSchema(BaseModel):
    """The schema of an answer; tests validate answers against it."""

    model_config = ConfigDict(extra="forbid")


@with_usage
class KVCacheUsage(ResponseSchema):
    policy: str | None
    budget: int | None
    sinks: int | None
    tokens_evicted: int
    blocks_freed: int
    peak_blocks: int
    final_blocks: int
    reclaim_efficiency: float | None


def errors_of(model: type[BaseModel]) -> Responses:
    """Error statuses of a generating route. model: the body."""
    return {status: {"model": model} for status in (400, 401, 404, 408, 413, 429, 500, 503)}


def streamed_body(model: type[BaseModel], events: str) -> Responses:
    """An answer that is one JSON object, or server-sent events with `stream`. events: their description."""
    content = {"text/event-stream": {"schema": {"type": "string", "description": events}}}
    return {200: {"model": model, "description": "The answer.", "content": content}}
