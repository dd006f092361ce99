"""Tables of the decode benchmark: speeds and ratios."""

from __future__ import annotations

import re
from collections.abc import Sequence
from statistics import geometric_mean

from rich.table import Table

from kvreclaim.bench.common import Row, table, text
from kvreclaim.bench.plans import LLAMACPP
from kvreclaim.bench.systems.base import OURS

RATIOS = (
    ("kvreclaim-full", "vllm"),
    ("kvreclaim-full", "transformers"),
    ("kvreclaim-triattention", "kvreclaim-full"),
    ("kvreclaim-query_mixture", "kvreclaim-full"),
    ("kvreclaim-triattention", "vllm"),
    ("kvreclaim-shares(surrogate)", "kvreclaim-surrogate"),
)
PEER_OF = {"int8": "llamacpp:q8_0", "int4": "llamacpp:q4_0"}
SHORT = {"vllm": "vLLM", "llamacpp": "llama.cpp"}


def speeds(rows: Sequence[Row]) -> dict[tuple[int, int], dict[str, float | None]]:
    """Tokens/s of each system by (context, batch), None if it was skipped."""
    points: dict[tuple[int, int], dict[str, float | None]] = {}
    for row in rows:
        points.setdefault((row["context"], row["batch"]), {})[row["system"]] = row["tokens_per_s"]
    return points


def ratio(systems: dict[str, float | None], over: str, under: str) -> float | None:
    """Speed of `over` by the speed of `under`; None if one of them is missing."""
    a, b = systems.get(over), systems.get(under)
    return None if a is None or b is None else a / b


def short(name: str) -> str:
    """Shorten a system's name for a heading, KV format and activations last."""
    system, *more = re.split("(?=@)|:", name)
    return " ".join([SHORT.get(system, system.removeprefix(OURS)), *more])


def _has_equal_bits(name: str, peer: str) -> bool:
    """Whether one of our systems stores keys and values in about as many bits as that peer."""
    form = name.partition("@")[0].partition(":")[2]
    return name.startswith(OURS) and PEER_OF.get(form, "llamacpp") == peer


def speed_table(rows: Sequence[Row]) -> Table:
    """Tokens/s: a line for each point or prompt length, a column for each system."""
    names = list(dict.fromkeys(row["system"] for row in rows))
    is_prompt = "prompt" in rows[0]
    title = "prompt tokens/s" if is_prompt else "decode tokens/s"
    made = table(title, ("prompt" if is_prompt else "context x batch", *map(short, names)))
    form = "{prompt:,}" if is_prompt else "{context:,} x {batch}"
    lines: dict[str, dict[str, float | None]] = {}
    for row in rows:
        lines.setdefault(form.format_map(row), {})[row["system"]] = row["tokens_per_s"]
    for place, speed in lines.items():
        made.add_row(place, *(text(speed.get(name), 1) for name in names))
    return made


def ratio_table(rows: Sequence[Row]) -> Table:
    """Ratios of the measured pairs, with the geometric mean and the least of each."""
    points = speeds(rows)
    names = list(dict.fromkeys(name for systems in points.values() for name in systems))
    coded = sorted(name for name in names if ":" in name and name.startswith(OURS))
    compared = (*RATIOS, *((name, name.partition(":")[0]) for name in coded))
    compared = (*compared, *((name, f"{name.partition(':')[0]}:bf16") for name in coded))
    peers = [name for name in names if name in LLAMACPP]
    compared = (*compared, *((name, peer) for name in names for peer in peers if _has_equal_bits(name, peer)))
    pairs = [
        pair
        for pair in compared
        if pair[0] != pair[1] and any(ratio(s, *pair) is not None for s in points.values())
    ]
    made = table("ratios", ("context x batch", *(f"{short(a)} / {short(b)}" for a, b in pairs)))
    for (context, batch), systems in points.items():
        made.add_row(f"{context:,} x {batch}", *(text(ratio(systems, *pair), 2) for pair in pairs))
    columns = [[r for s in points.values() if (r := ratio(s, *pair)) is not None] for pair in pairs]
    made.add_section()
    made.add_row("geometric mean", *(text(geometric_mean(column)) for column in columns))
    made.add_row("least", *(text(min(column)) for column in columns))
    return made
