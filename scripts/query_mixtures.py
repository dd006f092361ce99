"""Ablations of query_mixture, teacher-forced through the engine: one checkpoint, one task, many settings.

    scripts/query_mixtures.py --model DIR --name NAME --groups main --sequences 100

Each measurement goes at once into benchmarks/results/query-mixtures-NAME.json and is not made again; the
tables printed at the end (also with --tables-only) come from that file.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
from query_mixtures_grid import GROUPS, REFERENCE, Row, rows
from query_mixtures_heads import head_table
from query_mixtures_run import Bench, Results, Setting
from query_mixtures_tables import mean_cell, table

from kvreclaim import demo_model
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.model.loader import hide_progress_bars

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, default=demo_model())
    parser.add_argument("--name", default="demo", help="of the checkpoint, in the file's name")
    parser.add_argument("--task", choices=("chain-2k", *DEMO_TASKS), default="chain")
    parser.add_argument("--tokens", type=int, default=4096, help="of the longest document")
    parser.add_argument("--recent", type=int, default=64, help="last tokens protected")
    parser.add_argument("--fractions", type=float, nargs="+", default=[0.25, 0.1])
    parser.add_argument("--groups", nargs="+", choices=(*GROUPS, "heads"), default=["main"])
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start nothing new after these")
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--tables-only", action="store_true", help="measure nothing")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # the models are too small for more
    hide_progress_bars()
    setting = Setting(args.name, args.task, args.tokens, args.recent)
    results = Results(args.output / f"query-mixtures-{args.name}-{args.task}.json", setting)
    groups = [group for group in args.groups if group != "heads"]
    if not args.tables_only:
        bench = Bench(args.model, setting, args.sequences, results)
        measure_all(bench, groups, args)
        if "heads" in args.groups:
            print(head_table(bench))
    print_tables(results, groups, args.fractions)


def measure_all(bench: Bench, groups: list[str], args: argparse.Namespace) -> None:
    """Every row at every fraction, the full cache first."""
    begin = time.monotonic()
    bench.measure(Row("full", "full"), 1.0)
    for fraction in sorted(args.fractions):
        for group, row in rows(groups):
            if time.monotonic() - begin > 60 * args.minutes:
                print("out of time: what is missing is measured by the same command", file=sys.stderr)
                return
            value = bench.measure(row, fraction)
            cells = " | ".join(mean_cell(value[kind]) for kind in ("lookups", "carries"))
            print(f"{group:8} {fraction:4.0%} {row.label:44} {cells}", file=sys.stderr, flush=True)


def print_tables(results: Results, groups: list[str], fractions: list[float]) -> None:
    """One Markdown table per group and fraction, of what has been measured."""
    if (full := results.get(Row("full", "full").key(1.0), 1)) is not None:
        print(f"full cache: look-ups {mean_cell(full['lookups'])}, carries {mean_cell(full['carries'])}")
    for group in groups:
        for fraction in fractions:
            found = [(row.label, results.get(row.key(fraction), 1)) for _, row in rows([group])]
            lines = [(label, value) for label, value in found if value is not None]
            if lines:
                reference = results.get(REFERENCE.key(fraction), 1)
                count = min(value["sequences"] for _, value in lines)
                print(f"\n{results.setting.model}, {group}, {fraction:.0%}, {count} sequences\n")
                print(table(lines, reference))


if __name__ == "__main__":
    main()
