"""The best mix for a byte budget: which rows stay, and how they are shown."""

from __future__ import annotations

import io

import pytest
from reports import header
from rich.console import Console

from kvreclaim.eval import EvalReport, EvalRow, Metric
from kvreclaim.eval.report import FormatFacts, frontier
from kvreclaim.eval.show import show_report
from kvreclaim.eval.tables import mix_table, mixes

KIB = 1024.0
HEADER = header(
    kv_bytes_per_token=4096,
    kv_formats=[
        FormatFacts(name="bf16", bytes_per_token=4096, kernels="reference"),
        FormatFacts(name="int4", bytes_per_token=1152, kernels="native"),
    ],
)


def row(policy: str, dtype: str, fraction: float, kib: float, value: float | None, **fields) -> EvalRow:
    """kib: held, by each of 100 tokens of text."""
    figures = {"value": value, "kv_bytes": 100 * kib * KIB, "num_tokens": 100, "num_examples": 4}
    known = {"policy": policy, "fraction": fraction, "kv_cache_dtype": dtype, "task": "recall"}
    return EvalRow(**known, **{"metric": Metric.ACCURACY, **figures, **fields})


ROWS = [
    row("full", "bf16", 1.0, 4.0, 1.0),
    row("knorm", "bf16", 0.25, 1.0, 0.5),
    row("knorm", "bf16", 0.07, 0.3, 0.2),
    row("full", "int4", 1.0, 1.1, 0.98, ci95=(0.9, 0.99), of_full=0.98),
    row("knorm", "int4", 0.07, 0.3, 0.9),
    row("knorm", "int4", 0.03, 0.2, 0.9, status="error"),
    row("h2o", "int4", 0.03, 0.1, None, status="refused"),
]


@pytest.fixture
def report() -> EvalReport:
    return EvalReport(header=HEADER, rows=ROWS)


def test_a_row_stays_if_nothing_as_small_beats_it():
    assert [(r.policy, r.kv_cache_dtype, r.fraction) for r in frontier(ROWS)] == [
        ("knorm", "int4", 0.07),
        ("full", "int4", 1.0),
        ("full", "bf16", 1.0),
    ]


def test_of_equals_the_smaller_one_stays():
    rows = [row("a", "bf16", 0.5, 2.0, 0.9), row("b", "bf16", 0.4, 1.5, 0.9), row("c", "int4", 0.4, 1.5, 0.8)]
    assert [r.policy for r in frontier(rows)] == ["b"]
    assert frontier([]) == []


def test_of_perplexity_less_is_better():
    rows = [row(n, "bf16", 0.5, kib, v, metric=Metric.PERPLEXITY) for n, kib, v in
            (("a", 1.0, 9.0), ("b", 2.0, 7.0), ("c", 3.0, 8.0))]  # fmt: skip
    assert [r.policy for r in frontier(rows)] == ["a", "b"]


def test_lines_say_how_many_bytes_and_how_many_times_fewer(report):
    assert mix_table(report, "recall").lines == [
        ("0.3", "13.3 ×", "knorm, int4, 7% of the bytes", "0.900", "-", "-"),
        ("1.1", "3.6 ×", "full, int4", "0.980", "0.900..0.990", "0.980"),
        ("4", "1.0 ×", "full, bf16", "1.000", "-", "-"),
    ]


def test_the_table_is_shown_where_formats_were_compared(report):
    console = Console(file=io.StringIO(), width=160)
    show_report(console, report)
    assert "recall: best mix for a byte budget" in console.file.getvalue()
    assert "knorm, int4, 7% of the bytes" in console.file.getvalue()
    alone = EvalReport(header=HEADER, rows=[r for r in ROWS if r.kv_cache_dtype == "bf16"])
    assert mixes(alone) == []


def test_bytes_are_per_token_of_the_text():
    assert ROWS[0].bytes_per_token == 4096
    assert row("a", "bf16", 0.5, 2.0, 0.9, num_tokens=None).bytes_per_token is None
