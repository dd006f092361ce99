"""The page of `make gpu`: `python -m scripts.gpu.page OUT` writes OUT/gpu.md from OUT/session.jsonl.

With --docs it writes the tables into docs/performance.md, too, behind the text of its section "GPU".
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from kvreclaim.bench.common import Row, markdown
from scripts.gpu.bars import bars

PERFORMANCE = Path(__file__).parent.parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- tables of make gpu -->\n", "<!-- end of tables -->\n"
CEILINGS = "copy_gb_s read_gb_s bf16_tflop_s h2d_gb_s d2h_gb_s"
TABLES = {
    "Ceilings": ("copy_gb_s", CEILINGS),
    "Decode, a Llama of 8B parameters": (
        "passes",
        "label context batch ms_median ms_mean ms_max tokens_per_s gb share passes refusals",
    ),
    "Host tier": ("bus", "copy blocks gb_s share"),
    "Kernels of one step": ("launches", "step launches device_ms most"),
    "Kernels": ("op", "op context batch kv_cache_dtype block_size us gb_s share host_us graph error"),
    "Peers": ("peer", "peer context batch us gb_s share ms tokens_per_s"),
    "Serving": ("rate", "label rate num tokens_per_s ttft_ms_p50 ttft_ms_p99 tpot_ms_p50 tpot_ms_p99"),
    "Parts": ("state", "part state elapsed_s why"),
}
"""The field that its rows have, and all fields; share: of the bandwidth of a copy, or of the bus."""
TESTS = ("passed", "failed", "skipped")


def page(rows: list[Row]) -> str:
    head = next((row for row in rows if "machine" in row), {"machine": {}, "versions": {}})
    about = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    smi = "".join(f" `{row['smi']}` (driver, clocks, power)." for row in rows if row.get("smi"))
    title = f"# {head['machine'].get('gpu', 'No GPU')}\n\n    {head.get('command')}"
    return f"{title}\n\nCommit {head.get('commit')}; {about}.{smi}\n\n{tables(rows)}"


def tables(rows: list[Row]) -> str:
    """Bars, figures, tests, what failed."""
    facts: Row = {name: value for row in rows if row["part"] == "facts" for name, value in row.items()}
    facts = {name: facts[name] for name in CEILINGS.split() if name in facts}
    failed = [row for row in rows if "failed" in row]
    found = [row for row in rows if ("failed" not in row and row["part"] != "facts") or "state" in row]
    shares = [(row, facts.get(row.get("bus", "copy_gb_s"))) for row in found]
    found = [row | {"share": row["gb_s"] / of} if of and "gb_s" in row else row for row, of in shares]
    made = [f"### Bars\n\n{markdown(('bar', 'must be', 'measured', 'met'), bars(found))}"]
    for title, (key, fields) in TABLES.items():
        names = fields.split()
        lines = [[cell(row.get(name)) for name in names] for row in (facts, *found) if key in row]
        made += [f"### {title}\n\n{markdown([name.replace('_', ' ') for name in names], lines)}"] * bool(
            lines
        )
    made += [*tests([row for row in rows if "test" in row]), listed("Failed", map(failure, failed))]
    return "\n\n".join(filter(None, made)) + "\n"


def cell(value: Any) -> str:
    """A number with three digits or more, a text, or "-"."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if type(value) is int else str(value).replace("|", "\\|")


def tests(rows: list[Row]) -> list[str]:
    """Counts by part, the failed ones by name, and why tests were skipped."""
    worst: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["outcome"] != "failed"):
        worst.setdefault((row["part"], row["test"]), row)
    counts: dict[str, Counter[str]] = {}
    for row in worst.values():
        counts.setdefault(row["part"], Counter())[row["outcome"]] += 1
    lines = [[part, *(str(found[name]) for name in TESTS)] for part, found in counts.items()]
    failed = [f"`{row['test']}`: {row['why']}" for row in worst.values() if row["outcome"] == "failed"]
    skips = Counter(row["why"] for row in worst.values() if row["outcome"] == "skipped")
    made = [f"### Tests\n\n{markdown(('part', *TESTS), lines)}"] * bool(lines)
    skipped = [f"{number} x {why}" for why, number in skips.items()]
    return [*made, listed("Tests that failed", failed), listed("Skipped", skipped)]


def failure(row: Row) -> str:
    """One line: which measurement, and its error."""
    about = [str(value) for name, value in row.items() if name not in ("failed", "text")]
    return f"{', '.join(about)}: {row['failed'].splitlines()[0]}"


def listed(title: str, lines: Any) -> str:
    text = "\n".join(f"- {line}" for line in lines)
    return f"### {title}\n\n{text}" if text else ""


def into(docs: str, text: str) -> str:
    """The docs with these tables between their marks."""
    before, _, rest = docs.partition(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}"


def main(out: Path, *options: str) -> None:
    lines = (out / "session.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines if line.endswith("}")]
    (out / "gpu.md").write_text(page(rows), encoding="utf-8")
    if "--docs" in options:
        docs = into(PERFORMANCE.read_text(encoding="utf-8"), tables(rows))
        PERFORMANCE.write_text(docs, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
