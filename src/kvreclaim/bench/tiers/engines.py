"""Engines with tiers, of a size that fits what is measured."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from kvreclaim.bench.common import Row
from kvreclaim.bench.systems.base import CHUNK
from kvreclaim.bench.systems.ours import BLOCK_SIZE
from kvreclaim.bench.tiers.plan import TiersPlan
from kvreclaim.config import SamplingParams
from kvreclaim.engine.api.llm import LLM
from kvreclaim.engine.request.outputs import RequestOutput
from kvreclaim.errors import KVReclaimError
from kvreclaim.memory.blocks import blocks_for

GIB = 2**30
SPARE = 6
"""Prompts that a tier has room for: what makes way is not what is measured."""

DRAIN_S = 60.0


class WrongAnswerError(KVReclaimError, RuntimeError):
    """What came from a tier gives other tokens than what was computed."""


def load(plan: TiersPlan, dtype: str, **options: Any) -> LLM:
    """An engine whose pool holds one prompt and its answer, and little else."""
    return LLM(plan.model, dtype=dtype, **{**_limits(plan), **options})


def _limits(plan: TiersPlan) -> Mapping[str, Any]:
    length = plan.prompt + plan.answer + 2 * BLOCK_SIZE
    return {
        "block_size": BLOCK_SIZE,
        "num_blocks": blocks_for(length, BLOCK_SIZE) + 4,
        "max_num_seqs": 4,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": length,
        "spread_compression": False,
    }


def host_gib(llm: LLM, plan: TiersPlan) -> float:
    """Size of a host tier with room for SPARE prompts."""
    return SPARE * blocks_for(plan.prompt, BLOCK_SIZE) * llm.engine.cache.bytes_per_block / GIB


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def answer(llm: LLM, prompt: list[int], num_tokens: int) -> RequestOutput:
    """Greedy. Raises: RuntimeError if the request failed."""
    (output,) = llm.generate([prompt], greedy(num_tokens))
    if output.error is not None:
        raise RuntimeError(f"a request failed: {output.error}")
    return output


def drain(llm: LLM) -> None:
    """Wait until all that is on its way to disk is there. Raises: RuntimeError if that takes long."""
    tiers = llm.engine.tiers
    assert tiers is not None, "there are tiers"
    assert tiers.disk is not None, "there is a disk"
    patience = monotonic() + DRAIN_S
    while tiers.disk.tier.num_storing:
        if monotonic() > patience:
            raise RuntimeError(f"blocks are on their way to disk after {DRAIN_S:.0f} s: {tiers.disk.stats()}")
        tiers.disk.wait()
        tiers.disk.poll()


def require_equal(found: list[int], computed: list[int], what: str) -> None:
    """Raises: WrongAnswerError."""
    if found != computed:
        raise WrongAnswerError(f"{what}: tokens {found}, but {computed} where nothing was kept.")


def facts(plan: TiersPlan) -> Row:
    return {**plan.facts(), "tokens": plan.prompt, "block_size": BLOCK_SIZE}
