"""The tables of `kvreclaim bench groups`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.table import Table

from kvreclaim.bench.common import Columns, Row, cells, table

MEMORY: Final[Columns] = {
    "layers of": "{model}",
    "tokens": "{context:,}",
    "one table, bytes": "{one_table:,}",
    "groups, bytes": "{groups:,}",
    "ratio": "{ratio:.2f}",
}
HITS: Final[Columns] = {
    "layers of": "{model}",
    "occupancy": "{occupancy:.0%}",
    "blocks": "{blocks:,}",
    "hit tokens": "{hit_tokens:,}",
    "of an endless pool's": "{share:.1%}",
    "windows last out": "{share_last_out:.1%}",
}


def memory_table(rows: Sequence[Row]) -> Table:
    """One sequence, a line per model and length."""
    return _table("K/V of one sequence, bf16, blocks of 16", MEMORY, rows)


def hits_table(rows: Sequence[Row]) -> Table:
    """What conversations hit, a line per model and pool."""
    return _table("hits of conversations", HITS, rows)


def _table(title: str, columns: Columns, rows: Sequence[Row]) -> Table:
    made = table(title, list(columns), text_columns=1)
    for line in cells(columns, rows):
        made.add_row(*line)
    return made
