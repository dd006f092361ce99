"""Fields that /v1/completions and /v1/chat/completions share, and the engine's requests that they make; any
other field is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.types import Scope

from kvreclaim.beams import BeamSearchParams
from kvreclaim.chunks import Chunks
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.exports import EVERYTHING, Retention
from kvreclaim.engine.request.spec import RequestSpec
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.refusals import Feature
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.server.base.errors import ApiError, refuse_fields
from kvreclaim.server.base.fields import (
    MAX_TOKEN_LIST,
    BadWords,
    Fields,
    GeneratingFields,
    Listed,
    StopStrings,
    at_most,
    described,
    http_options,
)
from kvreclaim.server.base.identity import Tenant
from kvreclaim.server.openai.documents import ChunkReuseFields, Documents
from kvreclaim.server.openai.structured import StructuredField
from kvreclaim.server.shared.bodies import SHARED, check_priority, sampling_of
from kvreclaim.server.shared.service import Service

MAX_LOGPROBS = 20
MAX_USER_LENGTH = 512
MAX_METADATA = 16
Verbosity = Annotated[Literal["medium"], described("'medium'; no model here knows others")]
PromptCacheRetention = Literal["in_memory", "in-memory", "24h"]
RETENTION_S: Mapping[str, float] = {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}
DEFAULT_TTL_S = 300.0
LIMITS = ("max_tokens", "max_completion_tokens")
SAMPLING = (
    *SHARED,
    "n",
    "stop",
    "stop_token_ids",
    "allowed_token_ids",
    "bad_words",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "prompt_logprobs",
)
ONLY_BEAMS = ("beam_width", "length_penalty", "early_stopping")
DRAWN = (
    *(name for name in SAMPLING if name not in ("n", "ignore_eos")),
    "logprobs",
    "top_logprobs",
    "stream",
    "structured_outputs",
    "thinking_token_budget",
)
"""Fields for token-by-token sampling, which beam search refuses."""
HARMLESS = {"skip_special_tokens": True}
"""Values without effect; False for all other fields."""


class StreamOptions(Fields):
    """include_usage: a last chunk with the usage; continuous_usage_stats: usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class CacheControlParams(Fields):
    """ttl: in seconds"""

    type: Literal["ephemeral"] | None = None
    ttl: float | None = Field(None, gt=0, le=3600)


class AgentHint(Fields):
    """Hints of vLLM's RFC 52113. A conversation is identified by its tokens, so sessions have no ids."""

    cache_control: CacheControlParams | None = None


TokenIds = Annotated[Listed[int], Field(max_length=MAX_TOKEN_LIST)]


class SharedFields(GeneratingFields):
    """Fields of these two routes and of /v1/responses; docs/api.md describes them. None stands for the
    default given there."""

    model: str
    stop: StopStrings | None = None
    stop_token_ids: TokenIds | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: BadWords | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_cache_key: str | None = Field(None, min_length=1)
    prompt_cache_retention: PromptCacheRetention | None = None
    agent_hint: AgentHint | None = None
    user: str | None = Field(None, min_length=1, max_length=MAX_USER_LENGTH)
    safety_identifier: str | None = Field(None, min_length=1, max_length=MAX_USER_LENGTH)
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    store: bool | None = None
    structured_outputs: StructuredField | None = None
    documents: Documents | None = None
    chunk_reuse: ChunkReuseFields | None = None


class GenerationFields(SharedFields):
    """Fields of both routes."""

    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1)
    use_beam_search: bool | None = None
    beam_width: int | None = Field(None, ge=1)
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    return_token_ids: bool | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt that run concurrently."""
        return max(self.n or 1, self.beam_width or 1)


def check_options(fields: GenerationFields, service: Service, scope: Scope) -> None:
    """Check options that concern neither prompt nor sampling. Raises: ApiError."""
    scope["state"]["model"] = service.check_model(fields.model)
    _check_stream(fields)
    most = service.config.max_n
    for name in ("n", "beam_width"):
        number = getattr(fields, name)
        if number is not None and number > most:
            raise ApiError(
                400, f"{name} is {number}, but this server gives at most {most} outputs; lower it.", name
            )
    if fields.chunk_reuse is not None and fields.documents is None:
        raise ApiError(
            400, "chunk_reuse is set, but there are no documents; pass some, or leave it out.", "chunk_reuse"
        )
    users = {name for name in (fields.user, fields.safety_identifier) if name is not None}
    if len(users) > 1:
        raise ApiError(400, "user and safety_identifier differ; pass one of them.", "user")
    if users:
        scope["state"]["user"] = users.pop()


def sampling_params(fields: GenerationFields, **more: Any) -> SamplingParams:
    """more: SamplingParams fields with other names in the dialect. Raises: ApiError naming the field."""
    given = {name: getattr(fields, name) for name in SAMPLING} | more
    return sampling_of(given, type(fields).model_fields)


def engine_prompt(
    token_ids: list[int],
    params: SamplingParams,
    fields: GenerationFields,
    service: Service,
    tenant: Tenant,
    compression: CompressionConfig | None,
    *,
    beams: BeamSearchParams | None = None,
    chunks: Chunks | None = None,
) -> RequestSpec:
    """Build the engine's request for one prompt. Raises: ApiError."""
    check_priority(fields.priority, tenant, service.config)
    limits = [getattr(fields, name, None) for name in LIMITS]
    spec = RequestSpec(
        prompt_token_ids=token_ids,
        params=params,
        compression=compression,
        priority=fields.priority,
        retention=_retention(fields, len(token_ids), service),
        tenant=tenant.name,
        cache_salt=tenant.salt(fields.cache_salt),
        may_end_early=limits == [None] * len(limits),
        options=http_options(fields),
    )
    return spec.having(chunks).having(beams)


def beams_of(fields: GenerationFields, max_tokens: int) -> BeamSearchParams | None:
    """Return the requested beam search; None: no beam search. Raises: ApiError naming the field."""
    if not fields.use_beam_search:
        for name in ONLY_BEAMS:
            if getattr(fields, name) is not None:
                raise ApiError(
                    400, f"{name} is set, but use_beam_search is not true; set it, or leave {name} out.", name
                )
        return None
    for name in DRAWN:
        value = getattr(fields, name, None)
        changes_nothing = value is None or value is HARMLESS.get(name, False)
        if not changes_nothing and not (name == "temperature" and value == 0):
            refuse_fields({Feature.BEAM_SEARCH: True, Feature.SAMPLING: True}, name)
    number = fields.n or 1
    given = {name: getattr(fields, name) for name in ("length_penalty", "early_stopping", "ignore_eos")}
    try:
        return BeamSearchParams(
            beam_width=fields.beam_width or number,
            num_return_sequences=number,
            max_tokens=max_tokens,
            **{name: value for name, value in given.items() if value is not None},
        )
    except InvalidArgumentError as error:
        named = "n" if error.field == "num_return_sequences" else error.field
        raise ApiError(400, str(error), named if named in type(fields).model_fields else None) from error


def bounded(prompts: list[RequestSpec], service: Service) -> list[RequestSpec]:
    """Check the number of log-probabilities per answer, and set the resulting limit on outputs without one.
    Raises: ApiError 400."""
    params, limit = prompts[0].params, service.config.max_logprobs_per_request
    kept = [0 if number is None else number + 1 for number in (params.prompt_logprobs, params.logprobs)]
    of_prompts = kept[0] * sum(len(prompt.prompt_token_ids) for prompt in prompts)
    for_one = kept[1] * params.n
    left = limit - of_prompts
    if for_one and params.max_tokens is None and left >= for_one * len(prompts):
        fitting = replace(params, max_tokens=left // (for_one * len(prompts)))
        return [replace(prompt, params=fitting) for prompt in prompts]
    most = service.longest if params.max_tokens is None else params.max_tokens
    lengths = (min(most, service.longest - len(prompt.prompt_token_ids)) for prompt in prompts)
    number = of_prompts + for_one * sum(max(0, length) for length in lengths)
    if number > limit:
        raise ApiError(
            400,
            f"the answer could have {number} log-probabilities, at most {limit} are allowed; ask for fewer "
            "prompts, tokens or logprobs at once.",
            "logprobs" if for_one or params.prompt_logprobs is None else "prompt_logprobs",
        )
    return prompts


def _check_stream(fields: GenerationFields) -> None:
    options = fields.stream_options
    if options is not None and not fields.stream:
        raise ApiError(
            400, "stream_options is set, but stream is not; set stream or leave it out.", "stream_options"
        )
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise ApiError(
            400,
            "continuous_usage_stats needs include_usage; set both or neither.",
            "stream_options.continuous_usage_stats",
        )
    if fields.prompt_logprobs is not None:
        refuse_fields({Feature.PROMPT_LOGPROBS: True, Feature.STREAM: fields.stream})


def _retention(fields: GenerationFields, num_tokens: int, service: Service) -> tuple[Retention, ...]:
    """A hint keeps the answer, too. Without a retention, a key uses the shorter one. Raises: ApiError naming
    the field."""
    found = []
    if fields.agent_hint is not None and (control := fields.agent_hint.cache_control) is not None:
        is_off = not service.engine.served.config["enable_prefix_caching"]
        refuse_fields({Feature.RETENTION: True, Feature.NO_PREFIX_CACHE: is_off}, "agent_hint.cache_control")
        found.append(Retention(EVERYTHING, DEFAULT_TTL_S if control.ttl is None else control.ttl))
    if fields.prompt_cache_retention is not None or fields.prompt_cache_key is not None:
        found.append(Retention(num_tokens, RETENTION_S[fields.prompt_cache_retention or "in_memory"]))
    return tuple(found)
