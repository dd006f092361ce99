"""A policy defined next to its use, as in a notebook: no package and no entry point.

python examples/own_policy.py
"""

from dataclasses import dataclass

from torch import Tensor

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.compression.policy import CompressionPolicy, LayerView
from kvreclaim.testing import check_policy


@dataclass(frozen=True)
class LoudValues(CompressionPolicy):
    """Keep the tokens with the largest values."""

    name = "loud_values"

    def score(self, view: LayerView) -> Tensor:  # [K, T] fp32, higher = keep
        return view.source.value_norms()


check_policy(LoudValues())
prompt = [3 + i % 60 for i in range(600)]
params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
with LLM(demo_model()) as llm:
    with llm.compressed(CompressionConfig(LoudValues(), budget=256)):
        (short,) = llm.generate([prompt], params)
    (full,) = llm.generate([prompt], params)
for each in (short, full):
    print(f"{each.metrics.policy}: {each.metrics.blocks_freed} blocks freed")
