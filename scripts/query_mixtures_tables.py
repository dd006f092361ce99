"""Means, bootstrap intervals and paired differences, as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

RESAMPLES = 4000
KINDS = ("lookups", "carries")


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % percentile bootstrap of the mean, over sequences; fixed seed."""
    points = np.asarray(values)
    rows = np.random.default_rng(0).integers(0, len(points), (RESAMPLES, len(points)))
    low, high = np.percentile(points[rows].mean(axis=1), (2.5, 97.5))
    return float(low), float(high)


def mean_cell(values: Sequence[float] | None) -> str:
    """Mean [interval]."""
    if values is None:
        return "-"
    low, high = interval(values)
    return f"{np.mean(values):.3f} [{low:.3f}, {high:.3f}]"


def gain_cell(values: Sequence[float] | None, reference: Sequence[float] | None) -> str:
    """Mean difference from the reference over the same sequences [interval]; * where 0 is outside."""
    if values is None or reference is None:
        return "-"
    both = min(len(values), len(reference))
    gains = np.asarray(values[:both]) - np.asarray(reference[:both])
    low, high = interval(list(gains))
    mark = "*" if low > 0 or high < 0 else ""
    return f"{gains.mean():+.3f} [{low:+.3f}, {high:+.3f}]{mark}"


def table(lines: Sequence[tuple[str, dict[str, Any]]], reference: dict[str, Any] | None) -> str:
    """One table: a line per (label, measurement); differences where there is a reference."""
    kinds = [kind for kind in KINDS if any(value[kind] is not None for _, value in lines)]
    names = {"lookups": "look-ups", "carries": "carries"}
    heads = ["score", *(names[kind] for kind in kinds)]
    if reference is not None:
        heads += [f"{names[kind]}, less the reference" for kind in kinds]
    out = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for label, value in lines:
        if value["centres"] is not None and value["centres"] != value["calibration"]["num_centers"]:
            label = f"{label} ({value['centres']} left)"
        cells = [label, *(mean_cell(value[kind]) for kind in kinds)]
        if reference is not None:
            same = value is reference
            cells += ["" if same else gain_cell(value[kind], reference[kind]) for kind in kinds]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)
