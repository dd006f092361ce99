"""What one policy gains over another in points a row of RULER, with 95 % intervals (paired bootstrap).

    python benchmarks/ruler_gains.py FILE [POLICY [OTHER]]

FILE: in benchmarks/results. Without names: `auto`'s choice over kvpress' KVzip. Only rows that both ran
count, and of tasks with fewer than five such rows none where others have more. OTHER "full" or
"bf16 full": the share of the full cache's points at each budget, of all rows that both ran.
"""

import json
import sys
from pathlib import Path

import numpy as np

from kvreclaim.eval.intervals import bootstrap

FEWEST = 5


def main(file: str, policy: str = "shares(surrogate, floor=0.2)", other: str = "kvpress kvzip") -> None:
    points = json.loads(Path(file).read_text(encoding="utf-8"))["points"]
    cells = {(each["task"], each["policy"], each["share"]): each["rows"] for each in points}
    if other.endswith("full"):
        return _shares_of_full(cells, policy, other)
    shares = sorted({share for _, name, share in cells if name == other}, reverse=True)
    common = {
        task: set.intersection(*(set(cells[task, name, s]) for name in (policy, other) for s in shares))
        for task, name, _ in cells
        if name == other
    }
    fewest = min(FEWEST, max(map(len, common.values())))
    rows = [(task, row) for task, both in common.items() if len(both) >= fewest for row in sorted(both)]
    for share in shares:
        gains = np.array([cells[t, policy, share][row] - cells[t, other, share][row] for t, row in rows])
        found = bootstrap(lambda picks, gains=gains: gains[picks].mean(-1), len(gains))
        print(f"{share:.0%}: {len(rows)} rows, {gains.mean():.3f} ({found.low:.3f} to {found.high:.3f})")


def _shares_of_full(cells: dict[tuple[str, str, float], dict[str, float]], policy: str, full: str) -> None:
    for share in sorted({share for _, name, share in cells if name == policy}, reverse=True):
        pairs = np.array(
            [
                (points, cells[task, full, 1.0][row])
                for (task, *cell), rows in cells.items()
                for row, points in rows.items()
                if cell == [policy, share] and row in cells[task, full, 1.0]
            ]
        )
        found = bootstrap(lambda picks, pairs=pairs: _ratio(pairs[picks]), len(pairs))
        print(f"{share:.0%}: {len(pairs)} rows, {_ratio(pairs):.3f} ({found.low:.3f} to {found.high:.3f})")


def _ratio(pairs: np.ndarray) -> np.ndarray:
    """The sum of points over that of the full cache's, [..., n, 2] -> [...]."""
    sums = pairs.sum(-2)
    return sums[..., 0] / sums[..., 1]


if __name__ == "__main__":
    main(*sys.argv[1:])
