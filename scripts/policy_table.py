"""Print the table of policies in docs/policies.md, and one per task, from the JSON of `kvreclaim eval`."""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

Row = dict[str, object]


def cells(rows: Iterable[Row], policy: str, fraction: float, task: str | None = None) -> list[Row]:
    """The finished rows of a policy at a fraction; the full cache has one row for all fractions."""
    return [
        row
        for row in rows
        if row["policy"] == policy
        and row["status"] == "ok"
        and row["accuracy"] is not None
        and (policy == "full" or row["fraction"] == fraction)
        and task in (None, row["task"])
    ]


def average(found: list[Row], field: str, digits: int, *, factor: float = 1) -> str:
    values = [float(row[field]) for row in found]  # type: ignore[arg-type]
    return f"{factor * mean(values):,.{digits}f}" if values else "–"


def summary(rows: list[Row], policies: list[str], fractions: list[float]) -> list[str]:
    """One line a policy: accuracy at each fraction, and memory and speed at the middle one."""
    middle = fractions[len(fractions) // 2]
    head = [f"accuracy at {f:g}" for f in fractions]
    tail = [f"blocks freed at {middle:g}", "KV held", "tokens/s"]
    lines = [f"| policy | {' | '.join(head + tail)} |", "|---" * (len(head + tail) + 1) + "|"]
    for policy in policies:
        at = cells(rows, policy, middle)
        share = [float(r["kv_bytes"]) / float(r["kv_bytes_full"]) for r in at]  # type: ignore[arg-type]
        line = [average(cells(rows, policy, f), "accuracy", 3) for f in fractions]
        line += [f"{sum(int(r['blocks_freed']) for r in at):,}"]  # type: ignore[call-overload]
        line += [f"{mean(share):.0%}" if share else "–", average(at, "tokens_per_s", 0)]
        lines.append(f"| `{policy}` | {' | '.join(line)} |")
    return lines


def per_task(rows: list[Row], policies: list[str], fraction: float) -> list[str]:
    """Accuracy with its interval, a column for each task."""
    tasks = list(dict.fromkeys(str(row["task"]) for row in rows if row["accuracy"] is not None))
    lines = [f"| policy at {fraction:g} | {' | '.join(tasks)} |", "|---" * (len(tasks) + 1) + "|"]
    for policy in policies:
        line = []
        for task in tasks:
            found = cells(rows, policy, fraction, task)
            low, high = found[0]["ci95"] if found else (0, 0)  # type: ignore[misc]
            line.append(f"{found[0]['accuracy']:.3f} ({low:.2f}–{high:.2f})" if found else "–")
        lines.append(f"| `{policy}` | {' | '.join(line)} |")
    return lines


def tables(reports: list[Path]) -> list[list[str]]:
    """The summary, then the tables of each fraction, from the largest."""
    rows = [row for report in reports for row in json.loads(report.read_text())["rows"]]
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    fractions = sorted({row["fraction"] for row in rows if row["fraction"] < 1}, reverse=True)
    return [summary(rows, policies, fractions), *(per_task(rows, policies, f) for f in fractions)]


def main() -> None:
    """Read the report named on the command line and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "reports", type=Path, nargs="+", help="report.json of `kvreclaim eval`; one for each task"
    )
    for table in tables(parser.parse_args().reports):
        print("\n".join(table), end="\n\n")


if __name__ == "__main__":
    main()
