"""Formats of numbers."""

from __future__ import annotations


def size(num_bytes: float) -> str:
    """Format bytes in the largest binary unit of at least one: 40 GiB, 68.625 KiB, 12 bytes."""
    for unit, each in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= each:
            return f"{trim(num_bytes / each)} {unit}"
    return f"{trim(num_bytes)} bytes"


def trim(number: float) -> str:
    """Format a number with at most three decimal places and separated thousands."""
    text = f"{number:,.3f}"
    return text.rstrip("0").rstrip(".")


def per_cent(share: float) -> str:
    return f"{trim(100 * share)} %"


def billions(number: float) -> str:
    return f"{number / 1e9:.3f} B"


def count(number: int, noun: str, many: str | None = None) -> str:
    """1 block, 2 blocks."""
    return f"{number:,} {noun if number == 1 else many or noun + 's'}"
