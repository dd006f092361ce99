"""Check the policy's contract, then run it in the engine, alone and in a wrapper, and print what it frees."""

from kvreclaim import LLM, CompressionConfig, SamplingParams, demo_model
from kvreclaim.testing import check_policy

llm = LLM(demo_model())
prompt = [3 + i % 60 for i in range(600)]
for policy in ("fading_values", "segments(fading_values(half_life=64), n=4)"):
    check_policy(policy)
    config = CompressionConfig(policy, budget=128, recent=32)
    (out,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True), config)
    print(f"{policy}: {out.metrics.tokens_evicted} tokens evicted, {out.metrics.blocks_freed} blocks freed")
