"""The page of `make gpu`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvreclaim.bench.common import Columns, Row, cells, markdown
from kvreclaim.bench.kernels import COLUMNS

DECODE: Columns = {
    "system": "{system}",
    "tokens": "{context:,} x {batch}",
    "tokens/s": "{tokens_per_s:,.1f}",
}


def count(name: str) -> Callable[[Row], str]:
    """A cell with the number of tests that ended so."""
    return lambda row: str(row["outcomes"].get(name, 0)) if "outcomes" in row else "-"


PARTS: Columns = {
    "part": "{part}",
    "state": "{state}",
    "tests": "{collected}",
    **{name: count(name) for name in ("passed", "failed", "crashed", "skipped")},
    "s": "{elapsed_s:.0f}",
}


def page(head: Row, rows: Sequence[Row]) -> str:
    """Parts, then tests that failed, what did not run, and figures."""
    machine, versions = head["machine"], head["versions"]
    about = ", ".join(f"{name} {version}" for name, version in versions.items())
    sections = [
        f"# {machine.get('gpu', 'no GPU')}",
        f"    {head['command']}",
        f"Commit {head['commit']}; {machine['cpu']}; {about}.",
        table(PARTS, rows),
        section(
            "Tests that failed",
            [f"`{bad['test']}`: {bad['why']}" for row in rows for bad in row.get("bad", ())],
        ),
        section("Not run", not_run(rows)),
        *(figures(row) for row in rows if row.get("rows")),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def not_run(rows: Sequence[Row]) -> list[str]:
    """One line for each part without a result, and for each reason why tests were skipped."""
    found = []
    for row in rows:
        if row["why"]:
            running = f" (while `{row['running']}` ran)" if row.get("running") else ""
            found.append(f"{row['part']} {row['state']}: {row['why']}{running}")
        found += [f"{row['part']}, {number} skipped: {why}" for why, number in row.get("skips", {}).items()]
    return found


def figures(row: Row) -> str:
    given = row.get("bandwidth")
    speed = (
        "Read {read_gb_s:,.0f}, copy {copy_gb_s:,.0f} GB/s, {gflop_s:,.0f} GFLOP/s in fp32.\n\n"
        if given
        else ""
    )
    made = table(COLUMNS if given else DECODE, row["rows"])
    return f"## {row['part']}\n\n{speed.format_map(given or {})}{made}"


def table(columns: Columns, rows: Sequence[Row]) -> str:
    return markdown(columns, ([text.replace("|", "\\|") for text in line] for line in cells(columns, rows)))


def section(title: str, lines: Sequence[str]) -> str:
    return f"## {title}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""
