"""The page of `make gpu`: `python -m scripts.gpu.page OUT` writes OUT/gpu.md from OUT/session.jsonl.

With --docs it writes the tables into docs/performance.md, too, behind the text of its section "GPU".
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from kvreclaim.bench.common import Columns, Row, cells, markdown

PERFORMANCE = Path(__file__).parent.parent.parent / "docs" / "performance.md"
BEGIN, END = "<!-- tables of make gpu -->\n", "<!-- end of tables -->\n"
PARTS: Columns = {"part": "{part}", "state": "{state}", "s": "{elapsed_s:.0f}", "why": "{why}"}
CEILINGS: Columns = {
    "read, GB/s": "{read_gb_s:,.0f}",
    "copy, GB/s": "{copy_gb_s:,.0f}",
    "bf16, TFLOP/s": "{bf16_tflop_s:,.0f}",
    "host to device, GB/s": "{h2d_gb_s:,.1f}",
    "device to host, GB/s": "{d2h_gb_s:,.1f}",
}
TOKENS = "{context:,} x {batch}"
DECODE: Columns = {
    "cache": "{label}",
    "tokens": TOKENS,
    "ms, median": "{ms_median:.2f}",
    "mean": "{ms_mean:.2f}",
    "max": "{ms_max:.2f}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "GB a step": "{gb:.1f}",
    "of copy": "{share:.0%}",
    "passes": "{passes}",
    "steps without a graph": "{refusals}",
}
PROFILES: Columns = {
    "step": "{label}",
    "kernels": "{launches:,}",
    "ms": "{device_ms:.2f}",
    "most of it": lambda row: "; ".join(
        f"`{name}` {count} x, {ms:.2f} ms" for name, count, ms in row["top"][:6]
    ),
}
KERNELS: Columns = {
    "op": "{op}",
    "tokens": TOKENS,
    "K/V": "{kv_cache_dtype}",
    "block": "{block_size}",
    "µs": "{us:,.1f}",
    "GB/s": "{gb_s:,.0f}",
    "of copy": "{share:.0%}",
    "host, µs": "{host_us:,.0f}",
    "in a graph": "{graph}",
    "error": "{error:.1e}",
}
PEERS: Columns = {
    "peer": "{peer}",
    "tokens": TOKENS,
    "µs": "{us:,.0f}",
    "GB/s": "{gb_s:,.0f}",
    "of copy": "{share:.0%}",
    "ms a step": "{ms:.2f}",
    "tokens/s": "{tokens_per_s:,.0f}",
}
SERVE: Columns = {
    "cache": "{label}",
    "requests/s": "{rate:g}",
    "ended": "{ended} of {offered}",
    "tokens/s": "{tokens_per_s:,.0f}",
    "first token, ms, p50": "{ttft_ms_p50:,.0f}",
    "first token, p99": "{ttft_ms_p99:,.0f}",
    "between tokens, ms, p50": "{tpot_ms_p50:,.1f}",
    "between tokens, p99": "{tpot_ms_p99:,.1f}",
}
TESTS = ("passed", "failed", "skipped")


def page(rows: list[Row]) -> str:
    head = next((row for row in rows if "machine" in row), {"machine": {}, "versions": {}})
    about = ", ".join(f"{name} {version}" for name, version in head["versions"].items())
    title = f"# {head['machine'].get('gpu', 'No GPU')}\n\n    {head.get('command')}\n\n"
    smi = "".join(f" `{row['smi']}` (driver, clocks, power)." for row in rows if row.get("smi"))
    return f"{title}Commit {head.get('commit')}; {about}.{smi}\n\n{tables(rows)}"


def tables(rows: list[Row]) -> str:
    """Ceilings, figures, tests, what failed."""
    facts: Row = {name: value for row in rows if row["part"] == "facts" for name, value in row.items()}
    copy = facts.get("copy_gb_s")
    rows = [row | ({"share": row["gb_s"] / copy} if copy and "gb_s" in row else {}) for row in rows]
    made = [
        section("Ceilings", CEILINGS, [facts], lambda row: "copy_gb_s" in row),
        section("Decode, a Llama of 8B parameters", DECODE, rows, lambda row: "passes" in row),
        section("Kernels of one step", PROFILES, rows, lambda row: "launches" in row),
        section("Kernels", KERNELS, rows, lambda row: row["part"] == "kernels" and "us" in row),
        section("Peers", PEERS, rows, lambda row: "peer" in row and "error" not in row),
        section("Serving", SERVE, rows, lambda row: "offered" in row),
        tests([row for row in rows if "test" in row]),
        section("Parts", PARTS, rows, lambda row: "state" in row),
        listed("Failed", [failure(row) for row in rows if isinstance(row.get("error"), str)]),
    ]
    return "\n\n".join(filter(None, made)) + "\n"


def section(title: str, columns: Columns, rows: Iterable[Row], belongs: Callable[[Row], bool]) -> str:
    found = [row for row in rows if belongs(row)]
    lines = [[cell.replace("|", "\\|") for cell in line] for line in cells(columns, found)]
    return f"### {title}\n\n{markdown(columns, lines)}" if found else ""


def tests(rows: list[Row]) -> str:
    """Counts by part, the failed ones by name, and why tests were skipped."""
    worst: dict[tuple[str, str], Row] = {}
    for row in rows:
        known = worst.setdefault((row["part"], row["test"]), row)
        if row["outcome"] == "failed" and known["outcome"] != "failed":
            worst[row["part"], row["test"]] = row
    counts: dict[str, Counter[str]] = {}
    for row in worst.values():
        counts.setdefault(row["part"], Counter())[row["outcome"]] += 1
    lines = [[part, *(str(found[name]) for name in TESTS)] for part, found in counts.items()]
    failed = [f"`{row['test']}`: {row['why']}" for row in worst.values() if row["outcome"] == "failed"]
    skips = Counter(row["why"] for row in worst.values() if row["outcome"] == "skipped")
    made = [f"### Tests\n\n{markdown(('part', *TESTS), lines)}" if lines else ""]
    made += [listed("Tests that failed", failed), listed("Skipped", [f"{n} x {w}" for w, n in skips.items()])]
    return "\n\n".join(filter(None, made))


def failure(row: Row) -> str:
    """One line: which measurement, and its error."""
    about = [str(value) for name, value in row.items() if name not in ("error", "text")]
    return f"{', '.join(about)}: {row['error'].strip().splitlines()[0]}"


def listed(title: str, lines: list[str]) -> str:
    return f"### {title}\n\n" + "\n".join(f"- {line}" for line in lines) if lines else ""


def into(docs: str, text: str) -> str:
    """The docs with these tables between their marks."""
    before, _, rest = docs.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"the docs have no {BEGIN.strip()} and {END.strip()}"
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def main(out: Path, *options: str) -> None:
    text = (out / "session.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    (out / "gpu.md").write_text(page(rows), encoding="utf-8")
    if "--docs" in options:
        docs = into(PERFORMANCE.read_text(encoding="utf-8"), tables(rows))
        PERFORMANCE.write_text(docs, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
