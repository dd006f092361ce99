"""docs/lossless.png: what plain eviction, recall and verify mode answer rightly, by bytes on the device.

    .venv/bin/python scripts/lossless_chart.py

Needles on SmolLM2-135M-Instruct, asked after the compression, from the files of benchmarks/results that
docs/evidence.md and docs/recall.md name. Verify mode answers as the full cache, whatever its budget; where
the full cache lies on the host it holds two layers of it in buffers beside its budget.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
LAYERS = 30
TOKENS = 2500
PLAIN = ("shares(surrogate)", "snapkv", "streaming_llm", "knorm")
EVALUATIONS = tuple(f"eval-real-needles{name}.json" for name in ("", "-budgets", "-default", "-more"))
BUDGETS = (0.025, 0.05, 0.1, 0.2)


def rows(name: str) -> list[dict[str, Any]]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))["rows"]


def plain(policy: str) -> list[tuple[float, float]]:
    """(share of the full cache's bytes, right) from evaluations of the policy alone."""
    found = {}
    for name in EVALUATIONS:
        for row in rows(name):
            if row["policy"] == policy and row["task"] == "needles" and row["kv_cache_dtype"] == "auto":
                found[row["fraction"]] = row["accuracy"]
    for name in () if found else ("recall-needles.json", "recall-needles-20.json"):
        for row in rows(name):
            if row["policy"] == policy and row["recall"] is None and not row["delta"]:
                found[row["budget"] / TOKENS] = row["accuracy"]
    return sorted((share, right) for share, right in found.items() if share <= 0.5)


def recalled(policy: str) -> list[tuple[float, float]]:
    """The same with recall for each token; digests and kept queries count."""
    found = []
    for name in ("recall-needles.json", "recall-needles-20.json"):
        own = [row for row in rows(name) if row["policy"] == policy]
        extra = [row["delta"] for row in own if row["recall"] is None and row["delta"]]
        found += [
            ((row["budget"] + extra[-1]) / TOKENS, row["accuracy"]) for row in own if row["recall"] == "query"
        ]
    return sorted(found)


def main() -> None:
    full = next(row["accuracy"] for row in rows("recall-needles.json") if row["policy"] == "full")
    figure, axis = plt.subplots(figsize=(8, 4.5))
    colours = dict(zip(PLAIN, ("tab:green", "tab:blue", "tab:orange", "tab:red"), strict=True))
    for policy in PLAIN:
        if points := plain(policy):
            axis.plot(*zip(*points, strict=True), "o-", color=colours[policy], label=policy)
        if points := recalled(policy):
            axis.plot(
                *zip(*points, strict=True), "^--", color=colours[policy], label=f"{policy}, recall query"
            )
    verified = [(budget + 2 / LAYERS, full) for budget in BUDGETS]
    axis.plot(
        *zip(*verified, strict=True), "s-", color="black", label="any policy, verify, full cache on the host"
    )
    axis.axhline(full, color="grey", linewidth=0.8)
    axis.set(xlabel="bytes on the device, share of the full cache", ylabel="digits right", ylim=(0, 1))
    axis.set_title("codes in 2,500 tokens, asked after the compression (SmolLM2-135M-Instruct)")
    axis.legend(fontsize=8, loc=(0.55, 0.28))
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "lossless.png", dpi=120)


if __name__ == "__main__":
    main()
