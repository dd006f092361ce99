"""Facts about an engine for callers that may not touch it. Plain values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression_settings import AUTO
from kvreclaim.engine.api.llm import LLM
from kvreclaim.errors import KVReclaimError


@dataclass(frozen=True, slots=True)
class Auto:
    """The policy that "auto" resolves to. error: why there is none"""

    policy: str | None
    error: KVReclaimError | None

    @classmethod
    def of(cls, llm: LLM) -> Auto:
        """Resolve the policy by the engine's own statistics. Reads a file."""
        own = CompressionConfig() if llm.compression is None else llm.compression
        try:
            return cls(llm.resolved(dataclasses.replace(own, policy=AUTO, options={})).policy, None)
        except KVReclaimError as error:
            return cls(None, error)

    def named(self) -> str:
        """Raises: KVReclaimError."""
        if self.policy is None:
            assert self.error is not None
            raise self.error
        return self.policy


@dataclass(frozen=True, slots=True)
class ServedModel:
    """An engine's model and limits.

    name:        of the model, for messages
    max_model_len: tokens that a request without its own compression may have; longest: those that any
                 request may have
    compression: default of requests without their own
    config:      EngineConfig's fields as they were chosen; kv_format: of the cache; kv_bytes: of its pool
    density:     KVBytes.density of the cache's format
    has_end:     whether the model has an end-of-sequence token
    """

    name: str
    vocab_size: int
    max_model_len: int
    longest: int
    num_blocks: int
    block_size: int
    compression: CompressionConfig | None
    auto: Auto
    config: dict[str, Any]
    kv_format: str
    kv_bytes: int
    density: Fraction
    has_end: bool

    @classmethod
    def of(cls, llm: LLM) -> ServedModel:
        """Collect the facts. May read the file of statistics."""
        engine = llm.engine
        return cls(
            name=llm.loaded.facts.name,
            vocab_size=llm.loaded.vocab_size,
            max_model_len=engine.max_model_len,
            longest=engine.longest,
            num_blocks=engine.memory.pool.num_blocks,
            block_size=engine.memory.block_size,
            compression=llm.compression,
            auto=Auto.of(llm),
            config=dataclasses.asdict(engine.config),
            kv_format=engine.kv_format.name,
            kv_bytes=engine.memory.pool.num_blocks * engine.cache.bytes_per_block,
            density=llm.compressors.density,
            has_end=bool(llm.loaded.eos_token_ids),
        )
