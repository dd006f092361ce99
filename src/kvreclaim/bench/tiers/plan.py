"""What `bench tiers` measures: known, and checked, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvreclaim.bench.plans import ModelPlan, PolicyPlan
from kvreclaim.checks import require
from kvreclaim.options import option

LEAST_PROMPT = 64


@dataclass(frozen=True, kw_only=True)
class TiersPlan(PolicyPlan):
    """Three parts. tiers: slots of the device and of the host, in blocks of the trace; answer: tokens that
    must be equal before anything is timed."""

    hits: bool = option(True, "Replay the trace.")
    first_token: bool = option(True, "Time to the first token, by where the prompt is hit.")
    swap: bool = option(True, "Swapping a preempted sequence, against computing it again.")
    trace: Path | None = option(None, "JSON lines with hash_ids, such as Mooncake's.")
    tiers: tuple[int, ...] = option((1000, 16_000), "Blocks of the trace on the device, and in host memory.")
    prompt: int = option(8192, "Tokens of the prompt, and of a preempted sequence.", low=LEAST_PROMPT)
    answer: int = option(8, "Tokens that are compared first.", low=2)
    policies: tuple[str, ...] = option(
        ("full", "knorm"), "Of preempted sequences, comma-separated.", flags=("--policy",)
    )
    budget: int = option(512, "Of the policies, tokens.", low=1, unit=" tokens")
    rounds: int = option(5, "Of all cases, in turns.", low=1)

    def __post_init__(self) -> None:
        if self.first_token or self.swap:
            ModelPlan.__post_init__(self)
        require(
            len(self.tiers) == 2 and min(self.tiers) > 0,
            f"--tiers is {','.join(map(str, self.tiers))}; pass two positive numbers, the device's blocks "
            "and the host's, such as 1000,16000.",
        )
        require(bool(self.policies), "--policy is empty; name at least one, such as full or knorm.")
        for name in self.policies:
            self.policy(name)
