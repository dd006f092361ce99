"""What `kvreclaim bench verify` measures: known, and checked, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreclaim.bench.plans import DTYPES, THREADS
from kvreclaim.checks import require
from kvreclaim.options import check_options, option

DEMO = "demo"
"""The demo model, which is given documents of its own kind."""
SYSTEMS = ("full", "lossy", "verify", "full-host", "verify-host")
"""Where the full cache lies: in the pool or on the host; lossy: there is none."""


@dataclass(frozen=True, kw_only=True)
class LosslessPlan:
    """Text of Python's own documentation is continued greedily by a language model.

    model:   None: the real model, else the demo model
    tokens:  drawn by each sequence; the first ones, up to the slowest prompt, are not timed
    """

    model: Path | None = option(
        None, f"Model directory, or {DEMO}; the real model, else the demo model, where not said."
    )
    dtype: str = option("bfloat16", "bfloat16 or float32.", choices=DTYPES)
    threads: int = option(2, THREADS, low=1, high=1024)
    contexts: tuple[int, ...] = option((16384,), "Tokens of each prompt, comma-separated.")
    batches: tuple[int, ...] = option((1, 8), "Sequences at once, comma-separated.")
    policy: str = option("streaming_llm", "That drafts, and that compresses in the lossy system.")
    budget: int = option(1536, "Of the policy, tokens.", low=1)
    drafts: int = option(5, "Drafted at most between two verifications.", low=1, high=64)
    tokens: int = option(96, "Drawn by each sequence.", low=2)
    rounds: int = option(3, "Of all systems, in turns; medians are shown; 0: nothing is timed.", low=0)
    systems: tuple[str, ...] = option(SYSTEMS, "Comma-separated.")
    documents: int = option(2, "Of each of the demo model's tasks, compared first; 0: none.", low=0)

    def __post_init__(self) -> None:
        check_options(self)
        unknown = [name for name in self.systems if name not in SYSTEMS]
        require(not unknown, f"systems holds {unknown!r}; they are {', '.join(map(repr, SYSTEMS))}.")
        require("full" in self.systems, "systems lacks 'full', which the others are compared with; add it.")
        require(
            all(each > 0 for each in (*self.contexts, *self.batches)),
            f"contexts is {self.contexts} and batches {self.batches}; pass numbers above 0.",
        )

    def facts(self) -> dict[str, Any]:
        """What every row says of it."""
        return {
            "dtype": self.dtype,
            "threads": self.threads,
            "policy": self.policy,
            "budget": self.budget,
            "drafts": self.drafts,
        }
