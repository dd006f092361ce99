"""A session of a coding agent: the same edits of one file, for every agent."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

FILE = "shop.py"
BEGINNING = '''"""Prices of a shop, in cents."""


def total(prices):
    result = 0
    for price in prices:
        result += price
    return result


def discount(price, percent):
    return price - price * percent // 100
'''
EDITS: tuple[tuple[str, str], ...] = (
    (
        "Add a function `cheapest(prices)` that returns the smallest price.",
        "assert cheapest([3, 1, 2]) == 1",
    ),
    (
        "Let `discount` raise ValueError if percent is below 0 or above 100.",
        "try: discount(10, 101)\nexcept ValueError: pass\nelse: raise SystemExit(1)\n"
        "assert discount(200, 25) == 150",
    ),
    ("Rename the function `total` to `sum_of`.", "assert sum_of([1, 2]) == 3 and 'total' not in globals()"),
    (
        "Add a function `with_tax(price, percent)` that returns price + price * percent // 100.",
        "assert with_tax(200, 10) == 220",
    ),
    (
        "Add a function `mean(prices)`. It returns the sum of the prices divided by their number with //, "
        "and 0 for an empty list.",
        "assert mean([2, 4]) == 3 and mean([]) == 0",
    ),
    (
        "Add a function `average_with_tax(prices, percent)` that returns with_tax of mean(prices).",
        "assert average_with_tax([100, 300], 10) == 220",
    ),
)
"""Instructions, and code that passes at the file's end if the edit was made."""


def _prompt_tokens(url: str) -> tuple[int, int]:
    """Prompt tokens of all requests so far, and how many of them came from the prefix cache."""
    page = urllib.request.urlopen(f"{url}/metrics", timeout=30).read().decode()
    found = [
        sum(map(float, re.findall(rf"^vllm:{name}_total(?:{{.*}})? (\S+)$", page, re.MULTILINE)))
        for name in ("prompt_tokens", "prompt_tokens_cached")
    ]
    return int(found[0]), int(found[1])


def play(url: str, directory: Path, turn: Callable[[str], object]) -> str:
    """Give the agent one instruction after the other; return figures of the session. turn: makes one edit"""
    path = directory / FILE
    path.write_text(BEGINNING)
    applied, shares, started = 0, [], time.monotonic()
    for instruction, check in EDITS:
        before = _prompt_tokens(url)
        turn(instruction)
        tokens, cached = (now - then for now, then in zip(_prompt_tokens(url), before, strict=True))
        shares.append(f"{tokens - cached}/{tokens}")
        code = f"{path.read_text()}\n{check}"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
        applied += done.returncode == 0
    seconds = time.monotonic() - started
    return (
        f"{applied} of {len(EDITS)} edits apply; computed/prompt tokens: {', '.join(shares)}; {seconds:.0f} s"
    )
