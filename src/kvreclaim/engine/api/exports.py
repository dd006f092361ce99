"""What those above the engine need of the rooms below it, so that they reach no further."""

from kvreclaim.memory.pins import Retention
from kvreclaim.memory.stats import MemoryStats
from kvreclaim.model.loader import LoadedModel, Tokenizer

__all__ = ["LoadedModel", "MemoryStats", "Retention", "Tokenizer"]
