"""Types of lower rooms for the rooms above the engine, which import no further down."""

from kvreclaim.memory.pins import EVERYTHING, Retention
from kvreclaim.memory.stats import MemoryStats
from kvreclaim.model.loader import LoadedModel, Tokenizer

__all__ = ["EVERYTHING", "LoadedModel", "MemoryStats", "Retention", "Tokenizer"]
