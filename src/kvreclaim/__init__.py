"""LLM serving from a paged KV cache with compression that frees blocks."""

from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from kvreclaim.beams import BeamSearchParams
from kvreclaim.chunks import Chunk, ChunkReuse
from kvreclaim.config import EngineConfig
from kvreclaim.errors import (
    EngineDeadError,
    FetchError,
    InvalidArgumentError,
    KVReclaimError,
    RequestTooLongError,
    StatsMismatchError,
    UnknownRequestError,
    UnsupportedModelError,
    UnsupportedVllmError,
)
from kvreclaim.memory.pins import Retention
from kvreclaim.model_paths import real_model
from kvreclaim.sampling_params import SamplingParams
from kvreclaim.speculation import SpeculativeConfig

if TYPE_CHECKING:
    from kvreclaim.compression.config import CompressionConfig
    from kvreclaim.engine.api.llm import LLM
    from kvreclaim.engine.request.outputs import RequestOutput
    from kvreclaim.engine.serving.client import AsyncEngine

__version__ = version("kvreclaim")
__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "Chunk",
    "ChunkReuse",
    "CompressionConfig",
    "EngineConfig",
    "EngineDeadError",
    "FetchError",
    "InvalidArgumentError",
    "KVReclaimError",
    "RequestOutput",
    "RequestTooLongError",
    "Retention",
    "SamplingParams",
    "SpeculativeConfig",
    "StatsMismatchError",
    "StructuredOutputsParams",
    "UnknownRequestError",
    "UnsupportedModelError",
    "UnsupportedVllmError",
    "__version__",
    "demo_model",
    "real_model",
]

_HOMES = {
    "LLM": "kvreclaim.engine.api.llm",
    "StructuredOutputsParams": "kvreclaim.structured_outputs",
    "AsyncEngine": "kvreclaim.engine.serving.client",
    "CompressionConfig": "kvreclaim.compression.config",
    "RequestOutput": "kvreclaim.engine.request.outputs",
}


def __getattr__(name: str) -> object:
    """Import modules that need torch on first access, so that the integer rooms load without it."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kvreclaim' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def demo_model() -> Path:
    """Directory of the small model that ships with the package, its tokenizer and statistics."""
    return Path(__file__).parent / "assets" / "demo_model"
