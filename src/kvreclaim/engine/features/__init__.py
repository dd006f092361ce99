"""The features of requests. To add one, write its folder as in `engine/feature.py`, and add its line here."""

from __future__ import annotations

from kvreclaim.engine.feature import RequestFeature
from kvreclaim.engine.features.beams.feature import BeamSearches
from kvreclaim.engine.features.chunks.feature import ReusedChunks
from kvreclaim.engine.features.drops.feature import SpanDrops
from kvreclaim.engine.features.snapshots.feature import PromptSnapshots
from kvreclaim.engine.features.sparse_prefill.feature import SparsePrefills
from kvreclaim.engine.features.structured_outputs.feature import StructuredOutputs
from kvreclaim.engine.features.thinking.feature import ThinkingBudgets
from kvreclaim.engine.features.verification.feature import Verification

FEATURES: tuple[type[RequestFeature], ...] = (
    Verification,
    BeamSearches,
    ThinkingBudgets,
    SparsePrefills,
    ReusedChunks,
    PromptSnapshots,
    SpanDrops,
    StructuredOutputs,
)
"""Feature classes in the order in which they handle a new request."""
