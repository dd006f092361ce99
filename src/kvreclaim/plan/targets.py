"""Latency targets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kvreclaim.checks import require

MEASURES = ("ttft", "tpot", "e2e")
_SECONDS = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s)?")


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds at p99; None: no target."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __bool__(self) -> bool:
        return self != NONE

    def __str__(self) -> str:
        pairs = zip(MEASURES, (self.ttft_s, self.tpot_s, self.e2e_s), strict=True)
        return ",".join(f"{name}={seconds:g}s" for name, seconds in pairs if seconds is not None)


NONE = Targets()


def parse_targets(text: str | None, measures: Sequence[str] = MEASURES) -> Targets:
    """Parse `ttft=2s,tpot=60ms`. A number without a unit is in seconds. Raises: InvalidArgumentError."""
    found: dict[str, float] = {}
    for part in filter(None, (text or "").lower().replace(" ", "").split(",")):
        name, _, time = part.partition("=")
        match = _SECONDS.fullmatch(time)
        seconds = float(match[1]) / (1000 if match[2] == "ms" else 1) if match else 0.0
        require(
            name in measures and 0 < seconds < 1e6 and f"{name}_s" not in found,
            f"--slo is {text!r}, and {part!r} is no target; write ttft=2s,tpot=60ms, with any of "
            f"{', '.join(measures)}, each once.",
            "slo",
        )
        found[f"{name}_s"] = seconds
    return Targets(**found)
