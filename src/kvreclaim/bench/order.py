"""The table of `kvreclaim bench order`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from kvreclaim.bench.common import Columns, Row, cells, table

COLUMNS: Final[Columns] = {
    "trace": "{trace}",
    "order": "{way}",
    "prompt tokens": "{asked:,}",
    "computed": "{computed:,}",
    "waits": "{waits:,}",
    "cold p50 s": "{cold_p50_s:.3f}",
    "cold p99 s": "{cold_p99_s:.3f}",
    "warm p50 s": "{warm_p50_s:.3f}",
    "warm p99 s": "{warm_p99_s:.3f}",
}
RATIOS: Final[Columns] = {
    "trace": "{trace}",
    "cold p99 / fcfs": "{cold_p99_over_fcfs:.3f}",
    "computed / lpm": "{computed_over_lpm:.3f}",
}


def order_table(rows: Sequence[Row]) -> Table:
    """First tokens and work, a line per trace and order."""
    return _table("first tokens and computed tokens by order, virtual time", COLUMNS, rows, 2)


def ratio_table(rows: Sequence[Row]) -> Table:
    """What the policy cache costs those that are cold, and how much more it computes."""
    return _table("the policy cache beside others", RATIOS, rows, 1)


def _table(title: str, columns: Columns, rows: Sequence[Row], text_columns: int) -> Table:
    made = table(title, list(columns), text_columns=text_columns)
    for line in cells(columns, rows):
        made.add_row(*line)
    return made
