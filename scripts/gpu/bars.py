"""The bars of `make gpu`: what was measured against what it must be."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

from kvreclaim.bench.common import Row

TEST_PARTS = {"first tests", "kernel tests", "engine tests"}
LONG, SHORT = (32_768, 16), (2112, 32)
"""Context and batch of the bars."""
BLOCK_SIZE = 16


class Measured:
    """The rows by what they are of. A figure that was not measured is a KeyError."""

    def __init__(self, rows: Sequence[Row]) -> None:
        """rows: those with `gb_s` have their `share`, too"""
        self.rows = [row for row in rows if "failed" not in row]
        self.steps = {
            (row["label"], row["context"], row["batch"]): row for row in self.rows if "ms_mean" in row
        }
        self.attention = {
            row["kv_cache_dtype"]: row
            for row in self.rows
            if row.get("op") == "decode attention" and row["block_size"] == BLOCK_SIZE
            if (row["context"], row["batch"]) == LONG
        }

    def failed_tests(self) -> float:
        ended = {row["part"] for row in self.rows if row.get("state") in ("passed", "failed")}
        failed = {row["test"] for row in self.rows if row.get("outcome") == "failed"}
        if not failed and not ended >= TEST_PARTS:
            raise KeyError("some tests did not run")
        return len(failed)

    def attention_share(self) -> float:
        return float(self.attention["bf16"]["share"])

    def times_bf16(self, form: str) -> float:
        return float(self.attention["bf16"]["us"] / self.attention[form]["us"])

    def over_the_floor(self) -> float:
        return float(1 / self.steps["full", *SHORT]["share"])

    def unequal_over_equal(self) -> float:
        unequal, equal = (self.steps[f"{kind} heads", *SHORT]["ms_mean"] for kind in ("unequal", "equal"))
        return float(unequal / equal)

    def over_full(self, label: str) -> float:
        compressed, full = (self.steps[each, *LONG]["tokens_per_s"] for each in (label, "full"))
        return float(compressed / full)

    def over_transformers(self) -> float:
        peers = [row for row in self.rows if "tokens_per_s" in row and "transformers" in row.get("peer", "")]
        if not peers:
            raise KeyError("transformers did not run")
        ours = [self.steps["full", row["context"], row["batch"]]["tokens_per_s"] for row in peers]
        return float(min(own / row["tokens_per_s"] for own, row in zip(ours, peers, strict=True)))

    def bus_share(self) -> float:
        shares = {row["copy"]: row["share"] for row in self.rows if "bus" in row}
        return float(min(shares["to host"], shares["to blocks"]))


BARS: dict[str, tuple[Callable[[Measured], float], str, float]] = {
    "tests that failed": (Measured.failed_tests, "<=", 0),
    "bf16 decode attention, 32k x 16: share of a copy's bandwidth": (Measured.attention_share, ">=", 0.75),
    "the same in int8: speed over bf16": (lambda found: found.times_bf16("int8"), ">=", 1.5),
    "the same in int4: speed over bf16": (lambda found: found.times_bf16("int4"), ">=", 2.2),
    "8B step, 2k x 32: time over memory's floor": (Measured.over_the_floor, "<=", 1.5),
    "8B step, 2k x 32: time of unequal over equal heads": (Measured.unequal_over_equal, "<=", 1.15),
    "8B, 32k x 16, budget of 2,048, equal heads: tokens/s over the full cache": (
        lambda found: found.over_full("equal heads"),
        ">=",
        4,
    ),
    "the same with unequal heads": (lambda found: found.over_full("unequal heads"), ">=", 4),
    "8B, full cache: tokens/s over transformers, the least": (Measured.over_transformers, ">=", 5),
    "host tier: share of the bus, the slower direction": (Measured.bus_share, ">=", 0.8),
}
"""What is measured -> the figure, and what it must be."""
HOLDS = {"<=": operator.le, ">=": operator.ge}


def bars(rows: Sequence[Row]) -> list[list[str]]:
    """Lines of a table: the bar, what it must be, what was measured, whether it is met."""
    found, lines = Measured(rows), []
    for name, (figure, sense, limit) in BARS.items():
        try:
            value = figure(found)
        except KeyError:
            result = ["not measured", ""]
        else:
            result = [f"{value:.3g}", "yes" if HOLDS[sense](value, limit) else "no"]
        lines.append([name, f"{sense} {limit:g}", *result])
    return lines
