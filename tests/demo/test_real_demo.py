"""The demo's end on the real model: what it prints is what it measured."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kvreclaim import demo_model
from kvreclaim.demo.main import add_real, present, run_demo
from kvreclaim.demo.real import TASKS, RealPlan
from kvreclaim.demo.report import DemoReport
from kvreclaim.demo.runs import DemoPlan
from kvreclaim.eval.chain import ChainTask

pytestmark = pytest.mark.slow(
    "a minute and a half; the language model is in tests/eval/test_real_model.py, too"
)
TOY = DemoPlan(
    fractions=(),
    num_scored=1,
    num_generated=1,
    num_load=1,
    task=ChainTask(num_prompt_tokens=400, num_trace_tokens=200),
)
SMALL = RealPlan(
    others=("streaming_llm",),
    fractions=(0.25,),
    num_tokens=900,
    num_examples=1,
    num_talks=1,
    num_talk_tokens=600,
    num_load=4,
    num_load_tokens=600,
    num_answer_tokens=24,
    pool_share=0.5,
    chunk=128,
)


@pytest.fixture(scope="module")
def report(real_dir) -> DemoReport:
    quiet = Console(quiet=True)
    made = run_demo(demo_model(), TOY, quiet, command="test")
    add_real(made, real_dir, SMALL, quiet)
    return made


def test_every_policy_is_measured_on_codes_and_text(report):
    cells = {(row.policy, row.task): row for row in report.real.rows}
    best = report.real.load[1].policy
    assert set(cells) == {(policy, task) for policy in ("full", best, *SMALL.others) for task in TASKS}
    assert all(row.status == "ok" for row in cells.values())
    ours, window = (cells[policy, "needles"] for policy in (best, "streaming_llm"))
    assert ours.kv_bytes == window.kv_bytes < 0.5 * cells["full", "needles"].kv_bytes
    assert ours.value > window.value


def test_compressed_conversations_run_at_once(report):
    full, ours = report.real.load
    assert ours.most_running > full.most_running
    assert ours.peak_blocks <= report.real.num_blocks


def test_it_is_printed_drawn_and_written(report, tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    present(report, console, tmp_path, tmp_path / "demo.json")
    text = console.export_text()
    (asked,) = report.real.asked
    assert asked.question in text
    assert set(asked.answers) == {"full", report.real.load[1].label}
    assert all(repr(answer) in text for answer in asked.answers.values())
    assert (tmp_path / "real_model.png").read_bytes().startswith(b"\x89PNG")
    written = json.loads((tmp_path / "demo.json").read_text())["real"]
    assert [row["value"] for row in written["rows"]] == [row.value for row in report.real.rows]
