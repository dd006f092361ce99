"""The report's files: JSON that reads back, CSV with the same figures; and its tables."""

from __future__ import annotations

import csv
import io
import json

import pytest
from reports import header
from rich.console import Console

from kvreclaim.eval import EvalReport, EvalRow, Metric
from kvreclaim.eval.show import progress_bar, show_report

HEADER = header(command="kvreclaim eval --policies 'a<b>'")


def row(policy: str, fraction: float, **fields) -> EvalRow:
    figures = {
        "budget": int(2000 * fraction),
        "value": 0.9 * fraction,
        "accuracy": 0.9 * fraction,
        "ci95": (0.8 * fraction, 0.95 * fraction),
        "ci_method": "bootstrap",
        "value_by_seed": {"0": 0.5, "1": 0.75},
        "of_full": fraction,
        "of_full_ci95": (fraction, 1.0),
        "num_examples": 8,
        "num_judged": 80,
        "kv_bytes": 3e6 * fraction,
        "kv_bytes_peak": 3e6,
        "kv_bytes_full": 3e6,
        "blocks_freed": 1234,
        "reclaim_efficiency": 1.0,
        "tokens_per_s": 4321.0,
        "speed_of": "scoring",
        "lost_at": [0, 1, 0, 0, 0, 0, 0, 0, 0, 2],
        "asked_at": [4, 4, 4, 0, 0, 0, 0, 0, 0, 4],
        "extra": {"progress": 0.5},
    }
    known = {"policy": policy, "fraction": fraction, "kv_cache_dtype": "auto", "task": "recall"}
    return EvalRow(**{**known, "metric": Metric.ACCURACY, **figures, **fields})


def stopped(policy: str, fraction: float, status: str, reason: str) -> EvalRow:
    return EvalRow(
        policy=policy,
        fraction=fraction,
        kv_cache_dtype="auto",
        task="recall",
        metric=Metric.ACCURACY,
        status=status,
        reason=reason,
    )


@pytest.fixture
def report() -> EvalReport:
    rows = [row("full", 1.0), row("knorm(keep=large)", 0.5), row("knorm(keep=large)", 0.25)]
    rows += [stopped("h2o", fraction, "refused", "it <cannot>") for fraction in (0.5, 0.25)]
    rows += [stopped("oracle", 0.5, "error", "no compression fired")]
    return EvalReport(header=HEADER, rows=rows)


def test_json_reads_back(report, tmp_path):
    path = tmp_path / "new" / "report.json"
    report.write_json(path)
    assert EvalReport.model_validate_json(path.read_text()) == report
    first = json.loads(path.read_text())["rows"][0]
    wanted = {"policy", "fraction", "budget", "kv_cache_dtype", "task", "accuracy", "ci95"}
    assert wanted | {"blocks_freed", "kv_bytes", "tokens_per_s"} <= set(first)


def test_csv_has_the_same_figures(report, tmp_path):
    report.write_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(report.rows)
    for line, source in zip(lines, report.rows, strict=True):
        assert (line["policy"], line["status"]) == (source.policy, source.status)
        assert line["accuracy"] == ("" if source.accuracy is None else str(source.accuracy))
        assert line["ci95_high"] == ("" if source.ci95 is None else str(source.ci95[1]))
    assert lines[1]["value_by_seed"] == "0=0.5 1=0.75"
    assert lines[1]["lost_at"] == "0 1 0 0 0 0 0 0 0 2"
    assert lines[0]["progress"] == "0.5"


def test_budgets_in_tokens_are_shown_as_such():
    in_tokens = row("knorm", 0.5).model_copy(update={"fraction": None, "tokens": 512})
    assert [each.keeps for each in (row("full", 1.0), in_tokens)] == ["100%", "512 tokens"]


def test_the_terminal_shows_every_row_and_each_reason_once(report):
    console = Console(file=io.StringIO(), width=160)
    show_report(console, report)
    text = console.file.getvalue()
    assert text.count("knorm(keep=large)") == 2
    assert text.count("it <cannot>") == 1
    assert "0.400..0.475" in text
    assert "error: oracle 50% on recall: no compression fired" in text
    assert "recall (8 examples, 80 verdicts; tokens/s of scoring)" in text


def test_a_refused_first_row_does_not_speak_for_its_task(report):
    turned = EvalReport(header=HEADER, rows=report.rows[::-1])
    assert turned.summary("recall") == report.summary("recall")
    console = Console(file=io.StringIO(), width=160)
    show_report(console, turned)
    assert "4,321" in console.file.getvalue()


def test_brackets_in_a_policy_are_shown_as_they_are():
    console = Console(file=io.StringIO(), width=160)
    name = "query_mixture(offsets=[1,2])"
    with progress_bar(console) as on_start:
        on_start(3)(f"recall: {name}", 1)
    show_report(console, EvalReport(header=HEADER, rows=[row(name, 0.5)]))
    assert name in console.file.getvalue()


def test_rows_are_found_by_name(report):
    assert report.row("knorm(keep=large)", "recall", 0.25).budget == 500
    with pytest.raises(KeyError, match="tova"):
        report.row("tova", "recall")
