"""The report's files: JSON that reads back, CSV with the same figures, HTML that needs nothing else."""

from __future__ import annotations

import base64
import csv
import io
import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from reports import header
from rich.console import Console

from kvreclaim.eval import EvalReport, EvalRow, Metric, charts
from kvreclaim.eval.html import render, write_html
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


class Links(HTMLParser):
    """Collects what a page would load, and its text."""

    def __init__(self):
        super().__init__()
        self.links: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.links += [value for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data):
        self.words.append(data)


def test_html_is_one_file_with_all_charts(report, tmp_path):
    write_html(report, tmp_path / "report.html")
    page = Links()
    text = (tmp_path / "report.html").read_text()
    page.feed(text)
    assert len(page.links) == 4
    assert "@import" not in text
    assert "url(" not in text
    for link in page.links:
        kind, _, data = link.partition(";base64,")
        assert kind == "data:image/svg+xml"
        svg = base64.b64decode(data).decode()
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert not re.search(r'(?:href|src)="(?!#|data:)', svg)
    words = "".join(page.words)
    assert "kvreclaim eval --policies 'a<b>'" in words
    assert "refused: h2o 50% on recall, h2o 25% on recall: it <cannot>" in words
    assert "0.225" in words


def test_the_mean_of_a_suite_has_a_chart_of_its_own(report):
    alone = render(report)
    assert "Means of suites" not in alone
    mean = "ruler, mean of 2"
    rows = [*report.rows, row("full", 1.0, task=mean), row("knorm", 0.5, task=mean)]
    assert "<h2>Means of suites against K/V bytes</h2>" in render(EvalReport(header=HEADER, rows=rows))


def test_a_chart_has_budgets_in_tokens(report):
    extra = {"trace_tokens": 9.0}
    rows = [row("full", 1.0).model_copy(update={"extra": extra})]
    for share, tokens in ((0.5, 512), (0.25, 256)):
        update = {"fraction": None, "tokens": tokens, "extra": extra}
        rows.append(row("knorm", share).model_copy(update=update))
    in_tokens = EvalReport(header=HEADER, rows=rows)
    assert [each.keeps for each in in_tokens.rows] == ["100%", "512 tokens", "256 tokens"]
    page = render(in_tokens)
    assert "<h2>Tokens generated</h2>" in page
    assert "256 tokens" in page
    assert charts.trace_chart(report) is None


def test_a_report_without_figures_is_written_too():
    report = EvalReport(header=HEADER, rows=[stopped("h2o", 0.5, "refused", "why")])
    assert "why" in render(report)
    assert charts.quality_chart(report) is None
    assert charts.loss_chart(report, "recall") is None


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
