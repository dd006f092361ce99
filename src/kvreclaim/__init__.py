"""LLM serving from a paged KV cache whose compression gives blocks back."""

from importlib.metadata import version
from pathlib import Path

from kvreclaim.compression import CompressionConfig
from kvreclaim.config import SamplingParams
from kvreclaim.engine.llm import LLM

__version__ = version("kvreclaim")
__all__ = ["LLM", "CompressionConfig", "SamplingParams", "__version__", "demo_model"]


def demo_model() -> Path:
    """Directory of the small model that ships with the package, its tokenizer and statistics."""
    return Path(__file__).parent / "assets" / "demo_model"
