"""The demo's second part, on a language model: what it prints is what it measured."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvreclaim.demo.main import run_language_model
from kvreclaim.demo.real import TASKS, RealPlan

pytestmark = pytest.mark.slow(
    "a minute and a half; the language model is in tests/eval/test_real_model.py, too"
)
SMALL = RealPlan(
    others=("streaming_llm",),
    fractions=(0.25,),
    num_tokens=900,
    num_examples=1,
    num_load=4,
    num_load_tokens=600,
    num_answer_tokens=24,
    pool_share=0.5,
    chunk=128,
)


@pytest.fixture(scope="module")
def measured(real_dir, tmp_path_factory):
    """The figures, the folder with the chart, and what was printed."""
    out, console = tmp_path_factory.mktemp("demo"), Console(record=True, width=200, file=io.StringIO())
    return run_language_model(real_dir, SMALL, console, out), out, console.export_text()


def test_every_policy_is_measured_on_codes_and_text(measured):
    cells = {(row["policy"], row["task"]): row for row in measured[0]["eval"]["rows"]}
    best = measured[0]["load"][1]["policy"]
    assert set(cells) == {(policy, task) for policy in ("full", best, *SMALL.others) for task in TASKS}
    assert all(row["status"] == "ok" for row in cells.values())
    ours, window = (cells[policy, "needles"] for policy in (best, "streaming_llm"))
    assert ours["kv_bytes"] == window["kv_bytes"] < 0.5 * cells["full", "needles"]["kv_bytes"]
    assert ours["value"] > window["value"]


def test_compressed_conversations_run_at_once(measured):
    full, ours = measured[0]["load"]
    assert ours["most_running"] > full["most_running"]
    assert ours["peak_blocks"] <= SMALL.num_blocks


def test_it_is_printed_and_drawn(measured):
    figures, out, text = measured
    assert (out / "real_model.png").read_bytes().startswith(b"\x89PNG")
    forms = dict(zip(TASKS, (".3f", ".2f"), strict=True))
    assert all(format(row["value"], forms[row["task"]]) in text for row in figures["eval"]["rows"])
