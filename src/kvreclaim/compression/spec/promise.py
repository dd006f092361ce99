"""Budgets that a loss curve promises, for planning and simulation without torch."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from kvreclaim.checks import require
from kvreclaim.compression.spec.traits import footprint, for_prompt
from kvreclaim.compression_settings import AUTO, CONTENTS
from kvreclaim.kv_bytes import kv_bytes
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.options import option
from kvreclaim.schedule.budget.footprint import Footprint

cached_footprint = lru_cache(maxsize=1024)(footprint)


def footprint_of_prompt(
    text: str, num_prompt: int, *, block_size: int, max_chunk: int, density: Fraction
) -> Footprint:
    """Return the footprint of a prompt of this length, for a budget given as a share."""
    in_tokens = for_prompt(text, num_prompt, block_size, density)
    return cached_footprint(in_tokens, block_size=block_size, max_chunk=max_chunk)


@dataclass(frozen=True, slots=True)
class Promise:
    """kv_cache_dtype: the one that was named, or that max_loss chooses
    budgets:        by length of the longest prompt that they are for, rising; None: everything stays"""

    policy: str
    kv_cache_dtype: str
    budgets: tuple[tuple[int, int | None], ...]

    def compression(self, num_prompt: int, block_size: int) -> str | None:
        """Return policy and budget of a prompt of this length, like CompressionConfig.promised."""
        budget = next((budget for length, budget in self.budgets if length >= num_prompt), None)
        return (
            None if budget is None else f"{self.policy}:budget={blocks_for(budget, block_size) * block_size}"
        )

    def footprint(self, num_prompt: int, block_size: int, max_chunk: int) -> Footprint:
        """Return the footprint of a prompt of this length."""
        text = self.compression(num_prompt, block_size)
        if text is None:
            return Footprint(block_size=block_size, max_chunk=max_chunk)
        return cached_footprint(text, block_size=block_size, max_chunk=max_chunk)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromiseOptions:
    """Options with max_loss instead of a policy with a budget. Raises: InvalidArgumentError."""

    max_loss: float | None = option(
        None,
        "Instead of --compression: the budget that the loss curve promises for this loss, such as 0.01, by "
        "the length of each prompt.",
        low=0.0,
        high=1.0,
        flags=("--kv-max-loss",),
    )
    content: str | None = option(
        None,
        "What --kv-max-loss is about: prose, or lookups of facts. Default: whichever needs more tokens.",
        choices=CONTENTS,
        flags=("--kv-content",),
    )
    stats: str | None = option(
        None,
        "File of query statistics with a loss curve, for --kv-max-loss.",
        flags=("--kv-compression-stats",),
    )

    def promise(self, compression: str | None, kv_cache_dtype: str, dtype: str) -> Promise | None:
        """Return the promise; None without max_loss.

        compression, kv_cache_dtype: the other given options
        dtype:                       the model's dtype

        Raises: InvalidArgumentError.
        """
        if self.max_loss is None:
            for name in ("content", "stats"):
                require(
                    getattr(self, name) is None,
                    f"{name} is {getattr(self, name)!r}, but max_loss is None: it is about max_loss; give "
                    f"both, or leave {name} out.",
                    name,
                )
            return None
        from kvreclaim.compression.loss_curve import MEASURE_CURVE, read_curve

        require(
            compression is None,
            f"compression is {compression!r} and max_loss {self.max_loss}, which chooses a budget; leave one "
            "out.",
            "max_loss",
        )
        require(
            self.stats is not None,
            f"max_loss is {self.max_loss}, and no statistics are named; {MEASURE_CURVE} and name its file "
            "with --kv-compression-stats.",
            "stats",
        )
        curve = read_curve(str(self.stats))
        if kv_cache_dtype == AUTO:
            kv_cache_dtype, _ = curve.best_format(self.max_loss, self.content)
        losses = kv_bytes(kv_cache_dtype, dtype).dtype_name(kv_bytes(AUTO, dtype))
        budgets = (curve.promised(losses, self.max_loss, length, self.content) for length in curve.lengths)
        return Promise(curve.policy, kv_cache_dtype, tuple(zip(curve.lengths, budgets, strict=True)))
