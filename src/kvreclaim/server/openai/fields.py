"""Fields that /v1/completions and /v1/chat/completions share; any other field is refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from kvreclaim.server.base.fields import (
    MAX_TOKEN_LIST,
    BadWords,
    Fields,
    GeneratingFields,
    Listed,
    StopStrings,
    at_most,
    described,
)
from kvreclaim.server.openai.documents import ChunkReuseFields, Documents
from kvreclaim.server.openai.hints import AgentHint, NvExt
from kvreclaim.server.openai.structured import StructuredOutputs

MAX_LOGPROBS = 20
MAX_USER_LENGTH = 512
MAX_METADATA = 16
Verbosity = Annotated[Literal["medium"], described("'medium'; no model here knows others")]
PromptCacheRetention = Literal["in_memory", "in-memory", "24h"]
RETENTION_S: Mapping[str, float] = {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}


class StreamOptions(Fields):
    """include_usage: a last chunk with the usage; continuous_usage_stats: usage so far in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


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
    nvext: NvExt | None = None
    agent_hint: AgentHint | None = None
    user: str | None = Field(None, min_length=1, max_length=MAX_USER_LENGTH)
    safety_identifier: str | None = Field(None, min_length=1, max_length=MAX_USER_LENGTH)
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] | None = None
    metadata: Annotated[dict[str, str], at_most(MAX_METADATA)] | None = None
    store: bool | None = None
    structured_outputs: StructuredOutputs | None = None
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
