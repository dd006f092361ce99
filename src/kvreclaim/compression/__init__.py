"""Which tokens of a live sequence stay, how many, and where they move."""

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies.triattention import raw_scores
from kvreclaim.compression.policy import CompressionPolicy, LayerSignals, LayerView, Mode, Signal, Wrapper
from kvreclaim.compression.registry import make_policy, policy_class, policy_names, policy_spec
from kvreclaim.compression.select import select
from kvreclaim.compression.stats import LayerStats, QueryStats, StatsMetadata
from kvreclaim.compression.stats_builder import Clustering, StatsBuilder

__all__ = [
    "Clustering",
    "CompressionConfig",
    "CompressionPolicy",
    "Compressor",
    "LayerSignals",
    "LayerStats",
    "LayerView",
    "Mode",
    "QueryStats",
    "Signal",
    "StatsBuilder",
    "StatsMetadata",
    "Wrapper",
    "make_policy",
    "policy_class",
    "policy_names",
    "policy_spec",
    "raw_scores",
    "select",
]
