"""What is compared: the grid and the sizes, checked at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvreclaim.checks import check_int, check_number, require
from kvreclaim.compression import CompressionConfig, QueryStats
from kvreclaim.compression.registry import make_policy
from kvreclaim.config import AUTO, CompressionSettings, format_names
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.options import settings_of

FULL = "full"
DEFAULT_POLICIES = ("full", "streaming_llm", "knorm", "triattention", "query_mixture")
DEFAULT_BUDGETS = (0.5, 0.25, 0.1)
SHARED = tuple(name for name in settings_of(CompressionSettings) if name not in ("policy", "budget", "stats"))


@dataclass(frozen=True, slots=True)
class Setting:
    """One column of the grid: a policy at a share of the full cache's bytes, in one KV format."""

    policy: str
    fraction: float
    kv_cache_dtype: str

    @property
    def label(self) -> str:
        form = "" if self.kv_cache_dtype == AUTO else f" {self.kv_cache_dtype}"
        return f"{self.policy}{form} {self.fraction:.3g}"


@dataclass(frozen=True, kw_only=True)
class EvalPlan:
    """The grid policy x budget x KV format x task x seed, and the settings that all cells share.

    policies:       specs as in CompressionConfig.policy; "full" is run once, whatever the budgets
    budgets:        shares of the full cache's bytes at each sequence's final length, in (0, 1]
    kv_cache_dtypes: as in EngineConfig; "auto" is the model's own dtype. The full cache in the first of them
                    is what all others are compared with
    num_examples:   per cell and seed
    interval, sinks, recent, protect_prompt, mode, stats: as in CompressionConfig
    free_running:   also generate where a task scores a gold trace
    batch_size:     examples at once; fewer where the pool holds fewer
    """

    policies: Sequence[str] = DEFAULT_POLICIES
    budgets: Sequence[float] = DEFAULT_BUDGETS
    kv_cache_dtypes: Sequence[str] = (AUTO,)
    seeds: Sequence[int] = (0,)
    num_examples: int = 16
    interval: int = 128
    sinks: int = 4
    recent: int = 64
    protect_prompt: bool = False
    mode: str | None = None
    stats: str | os.PathLike[str] | QueryStats | None = None
    free_running: bool = False
    batch_size: int = 16

    def __post_init__(self) -> None:
        for name in ("policies", "budgets", "kv_cache_dtypes", "seeds"):
            values = getattr(self, name)
            require(
                isinstance(values, (list, tuple)) and bool(values),
                f"{name} is {values!r}; it must be a non-empty list.",
            )
            object.__setattr__(self, name, tuple(dict.fromkeys(values)))
        object.__setattr__(self, "kv_cache_dtypes", format_names(self.kv_cache_dtypes))
        for policy in self.policies:
            make_policy(policy)
        for budget in self.budgets:
            check_number("a budget", budget, 0.0, 1.0)
            require(budget > 0, f"a budget is {budget!r}; it must be a share above 0, up to 1.")
        for seed in self.seeds:
            check_int("a seed", seed, 0)
        check_int("num_examples", self.num_examples, 1)
        check_int("batch_size", self.batch_size, 1)
        most = 10**9  # budgets are checked per sequence; everything else that a config refuses, here
        CompressionConfig(FULL, most, **self.shared)

    def settings(self) -> list[Setting]:
        """All columns; the full cache once for each KV format."""
        return [
            Setting(policy, float(fraction), dtype)
            for dtype in self.kv_cache_dtypes
            for policy in self.policies
            for fraction in ((1.0,) if make_policy(policy).name == FULL else self.budgets)
        ]

    def compression(
        self, setting: Setting, budget: int, stats: QueryStats | None
    ) -> CompressionConfig | None:
        """The configuration of one sequence; None for the full cache. Raises: InvalidArgumentError."""
        if make_policy(setting.policy).name == FULL:
            return None
        if budget < 1:
            raise InvalidArgumentError(
                f"{setting.fraction:g} of this sequence's cache is less than one block; raise the number of "
                "tokens or the budget, or lower the block size."
            )
        return CompressionConfig(setting.policy, budget, stats=stats, **self.shared)

    @property
    def shared(self) -> dict[str, Any]:
        """Settings of every compression, by the names of CompressionConfig's fields; stats are extra."""
        return {name: getattr(self, name) for name in SHARED}


def split_specs(text: str) -> list[str]:
    """Split a list at its commas, except at those inside parentheses: "a,b(c,d)" -> ["a", "b(c,d)"].

    Raises: InvalidArgumentError where parentheses do not match.
    """
    parts, depth = [""], 0
    for char in text:
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth:
        raise InvalidArgumentError(
            f"{text!r} has parentheses that do not match; write, for example, a,b(c,d)."
        )
    return [part.strip() for part in parts if part.strip()]
