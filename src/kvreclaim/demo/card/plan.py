"""What runs on the small card, and what is found, as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

MIB = 1 << 20
SCALE = 64
"""A card of 24 GiB over this is the small one. SmolLM2-135M with weights of 4 bits takes 96 MB and 23,040
bytes of cache a token, a 32 B model 19.3 GB and 262,144: so small, both hold the same number of tokens."""

REFUSED = 2
"""Exit status of a process whose input is to blame; its stderr says in a sentence how."""


@dataclass(frozen=True, slots=True)
class ChainSetup:
    """One way of running the chain. whole_pool: blocks for the whole chain are asked for, fit or not"""

    name: str
    kv_cache_dtype: str = "bf16"
    policy: str | None = None
    whole_pool: bool = False


POLICY = "lagkv"
"""The best without calibration (docs/evidence.md); statistics would belong to one rotation and packing."""

SETUPS = (
    ChainSetup("pool for all of it", whole_pool=True),
    ChainSetup("full cache"),
    ChainSetup("budget", policy=POLICY),
    ChainSetup("int4", kv_cache_dtype="int4"),
    ChainSetup("budget and int4", kv_cache_dtype="int4", policy=POLICY),
)


@dataclass(frozen=True, kw_only=True)
class CardPlan:
    """A chain of thought on a card that is too small for it.

    model:     a GGUF file, or a directory with packed weights
    num_tokens: of the chain, prompt and all
    card_bytes: of the card; utilization of it for weights, activations and blocks, as a server takes it
    runtime_bytes: of the card, for what a GPU's driver takes
    pool_share: of what is free when the weights are there, for blocks; the rest is for activations
    budget:    tokens that compression keeps for each layer and head, at intervals of `interval`
    every:     tokens between two samples of memory
    """

    model: Path
    num_tokens: int = 32_768
    card_bytes: int = 24 * 1024 * MIB // SCALE
    utilization: float = 0.92
    runtime_bytes: int = 1_200_000_000 // SCALE
    pool_share: float = 0.9
    budget: int = 2048
    interval: int = 128
    every: int = 128
    threads: int | None = None
    setups: tuple[ChainSetup, ...] = SETUPS

    @property
    def limit_bytes(self) -> int:
        """What a process may take beside what its libraries have taken."""
        return int(self.card_bytes * self.utilization) - self.runtime_bytes


class ChainSample(BaseModel):
    """tokens: of the chain so far; block_bytes: of blocks in use"""

    tokens: int
    elapsed_s: float
    block_bytes: int


class CardRun(BaseModel):
    """What became of the chain.

    outcome:    "done"; "pool full" where it ended before its time, since one sequence had every block;
                "out of memory" where the engine could not begin
    said:       why, where it is not done
    peak_bytes: of memory that was taken, by the kernel's count, which is what the limit counts
    """

    name: str
    kv_cache_dtype: str
    policy: str | None
    budget: int | None
    outcome: str
    said: str = ""
    tokens: int = 0
    weight_bytes: int = 0
    num_blocks: int = 0
    bytes_per_block: int = 0
    peak_blocks: int = 0
    peak_bytes: int = 0
    elapsed_s: float = 0.0
    tokens_evicted: int = 0
    blocks_freed: int = 0
    samples: list[ChainSample] = []

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.elapsed_s if self.elapsed_s else 0.0


class CardReport(BaseModel):
    """All runs. limit_bytes: of each process, beside its libraries"""

    command: str
    cpu: str
    model: str
    num_tokens: int
    card_bytes: int
    limit_bytes: int
    runs: list[CardRun]
