"""Budgets of prompts inside vLLM: a share of their bytes, or the loss curve's budget for max_loss.

The front end and the scheduler compute them from the same lengths and file, so they agree.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any

from kvreclaim.checks import require
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.loss_curve import MEASURE_CURVE, LossCurve, read_curve
from kvreclaim.compression_settings import MEASURED, CompressionSettings
from kvreclaim.options import settings_of

_read = lru_cache(maxsize=8)(read_curve)


def curve_in(stats: str | None, max_loss: float) -> LossCurve:
    """Read once in a process. Raises: InvalidArgumentError without statistics, or a curve in them."""
    require(
        stats is not None,
        f"max_loss is {max_loss}, and the server was started without statistics; {MEASURE_CURVE} and name "
        'its file as "stats", or give a budget.',
        "max_loss",
    )
    assert stats is not None
    return _read(stats)


def in_place_of_budget(given: dict[str, Any]) -> dict[str, Any]:
    """Return settings without those that they replace: a budget replaces max_loss, and max_loss replaces a
    budget and all settings that losses are not measured with."""
    if "budget" in given:
        return {"max_loss": None, "content": None, **given}
    if given.get("max_loss") is not None:
        known = settings_of(CompressionSettings)
        return {name: known[name].default for name in MEASURED} | {"budget": None, **given}
    return given


def density_of(config: Any) -> Fraction | None:
    """Return the tokens in vLLM's --kv-cache-dtype that take the bytes of one in the model's dtype.

    Returns: None where layers differ: TurboQuant keeps some of them in the model's dtype
    """
    dtype, own = config.cache_config.cache_dtype, 8 * config.model_config.dtype.itemsize
    if dtype.startswith("turboquant_"):
        return None
    if not dtype.endswith("_per_token_head"):
        return Fraction(own, {"auto": own, "float16": 16, "bfloat16": 16}.get(dtype, 8))
    dim = config.model_config.get_head_size()
    bits = 4 if dtype.startswith("int4") else 8
    return Fraction(own * dim, bits * dim + 32)  # each key and value has a scale of 32 bits


def check_cache_dtype(settings: CompressionConfig, config: Any) -> None:
    """Raises: InvalidArgumentError where keys and values are not in the model's dtype. vLLM's coded formats
    have other scales than those in which losses are measured."""
    dtype, own = config.cache_config.cache_dtype, str(config.model_config.dtype).removeprefix("torch.")
    require(
        settings.max_loss is None or dtype in ("auto", own),
        f"max_loss is {settings.max_loss}, but losses of vLLM's own formats are not measured, and "
        f"--kv-cache-dtype is {dtype}; leave it out for {own}, or give a budget.",
        "max_loss",
    )


def budget_text(settings: CompressionConfig) -> str:
    """Describe the budget or the setting that chooses it."""
    if settings.max_loss is not None:
        return f"max_loss {settings.max_loss}"
    share = settings.budget_share
    return f"budget {settings.budget}" if share is None else f"budget {100 * share:.4g}%"
