"""Which tokens of a live sequence stay, how many, and where they move."""

from kvreclaim.compression.compressor import Compressor as Compressor
from kvreclaim.compression.config import CompressionConfig as CompressionConfig
from kvreclaim.compression.policies.triattention import raw_scores as raw_scores
from kvreclaim.compression.policy import CompressionPolicy as CompressionPolicy
from kvreclaim.compression.policy import CountsQuestion as CountsQuestion
from kvreclaim.compression.policy import LayerSignals as LayerSignals
from kvreclaim.compression.policy import LayerView as LayerView
from kvreclaim.compression.policy import Mode as Mode
from kvreclaim.compression.policy import Signal as Signal
from kvreclaim.compression.policy import Wrapper as Wrapper
from kvreclaim.compression.registry import make_policy as make_policy
from kvreclaim.compression.registry import policy_class as policy_class
from kvreclaim.compression.registry import policy_names as policy_names
from kvreclaim.compression.registry import policy_spec as policy_spec
from kvreclaim.compression.select import select as select
from kvreclaim.compression.stats import LayerStats as LayerStats
from kvreclaim.compression.stats import QueryStats as QueryStats
from kvreclaim.compression.stats import StatsMetadata as StatsMetadata
from kvreclaim.compression.stats_builder import Clustering as Clustering
from kvreclaim.compression.stats_builder import StatsBuilder as StatsBuilder
