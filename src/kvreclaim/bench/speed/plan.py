"""What `kvreclaim calibrate-speed` measures."""

from __future__ import annotations

from dataclasses import dataclass

from kvreclaim.bench.plans import PolicyPlan
from kvreclaim.options import option


@dataclass(frozen=True, kw_only=True)
class SpeedPlan(PolicyPlan):
    """What is run: random requests, at changing numbers at once, for `seconds`."""

    seconds: float = option(60.0, "Seconds of random load.", low=1.0, high=86_400.0, unit=" s")
    longest: int = option(512, "Maximum tokens of a prompt, and of an answer.", low=8)
    max_num_seqs: int = option(32, "Maximum number of sequences in one step.", low=1)
    num_blocks: int = option(4096, "Number of blocks in the pool.", low=1)
    compress: str = option("full", "Compression policy of every request.", flags=("--policy",))
    seed: int = 0
