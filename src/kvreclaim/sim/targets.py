"""Latency targets of a service."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kvreclaim.checks import require
from kvreclaim.sim.request import RequestRecord

AXES = ("replicas", "max_num_seqs", "budget", "rate")
"""Values that a search can vary."""
MEASURES = ("ttft", "tpot", "e2e")
_TIME = re.compile(r"(\d+\.?\d*|\.\d+)(ms|s)")


@dataclass(frozen=True, slots=True)
class Targets:
    """Seconds; None: nothing is asked. They are to be kept by 99 of 100 requests."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.ttft_s, self.tpot_s, self.e2e_s))

    def kept_by(self, record: RequestRecord) -> bool:
        """Whether a request that has ended kept all of them."""
        return (
            (self.ttft_s is None or record.ttft_s <= self.ttft_s)
            and (self.e2e_s is None or record.e2e_s <= self.e2e_s)
            and (self.tpot_s is None or (record.tpot_s or 0.0) <= self.tpot_s)
        )

    def __str__(self) -> str:
        pairs = zip(MEASURES, (self.ttft_s, self.tpot_s, self.e2e_s), strict=True)
        return ",".join(f"{name}={seconds:g}s" for name, seconds in pairs if seconds is not None)


NONE = Targets()


def parse_targets(text: str | None) -> Targets:
    """ttft=2s,tpot=60ms,e2e=30s, any of them. Raises: InvalidArgumentError."""
    found: dict[str, float] = {}
    for part in (text or "").replace(" ", "").split(","):
        if not part:
            continue
        name, _, time = part.partition("=")
        match = _TIME.fullmatch(time)
        require(
            name in MEASURES and match is not None and f"{name}_s" not in found,
            f"--slo {text!r}: {part!r} is no target; write ttft=2s,tpot=60ms,e2e=30s, any of these once.",
            "slo",
        )
        assert match is not None
        found[f"{name}_s"] = float(match[1]) / (1000 if match[2] == "ms" else 1)
    return Targets(**found)
