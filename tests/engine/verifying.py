"""Settings under which compressed caches draft over short texts, and what is compared."""

from __future__ import annotations

import tiny
from settings import small

from kvreclaim import LLM, CompressionConfig, SamplingParams

GIB = 2**30
PROMPTS = tiny.prompts((70, 5, 33, 50), seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True, logprobs=2)
POLICIES = (
    "knorm",
    "snapkv",
    "query_mixture",
    "h2o",
    "kvzap",
    "paged_eviction",
    "ada_kv(snapkv)",
    "shares(snapkv)",
    "quest",
    "snapkv(when=prefill)",
    "kvzip",
)
"""One of every way, and of every moment."""


def drafting(policy: str = "query_mixture", **fields) -> CompressionConfig:
    """Makes many passes over short sequences, and drafts only."""
    if policy == "quest":
        fields = {"budget": 48, "sinks": 0, "recent": 1, **fields}
    elif policy == "paged_eviction":
        fields = {"budget": 48, **fields}
    elif policy.startswith(("ada_kv", "shares")):
        fields = {"budget": 32, "interval": 16, **fields}
    return small(policy, verify=True, **{"verify_tokens": 8, **fields})


def on_host(llm: LLM, num_blocks: int = 200, **changes) -> LLM:
    """The same engine, its full caches in so many blocks in host memory."""
    size = (num_blocks + 0.5) * llm.engine.cache.bytes_per_block / GIB
    return llm.sibling(full_cache_host_size=size, **changes)


def results(outputs) -> list:
    """Texts, tokens, ends and log-probabilities, which are equal only where all logits are."""
    return [[(o.text, o.token_ids, o.finish_reason, o.logprobs) for o in out.outputs] for out in outputs]
