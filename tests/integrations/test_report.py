"""One line in the log for every thousand passes, with the figures of the ledger."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from list_pool import computed, make_ledger

from kvreclaim.integrations.vllm.live import step_observer as module
from kvreclaim.integrations.vllm.live.step_observer import Report
from kvreclaim.integrations.vllm.scheduler.passes import Totals

LINE = (
    "kvreclaim: 2,000 passes: 64,500 tokens evicted, 2,020 blocks given back (50 % of those that requests "
    "have had); the last 1,000 took 5.0 % of 20 s"
)


def test_every_figure_is_in_its_place(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kvreclaim")
    lines = caplog.records
    totals, now = Totals(), [100.0]
    pool: Any = SimpleNamespace(places={"a": 3000, "b": 1000, "c": 40}.__getitem__)
    report = Report(totals, pool, lambda: now[0])
    totals.compactions, totals.seconds = 1001, 3.0
    now[0] = 130.0
    report.passed([])
    assert len(lines) == 1
    report.ending("a")
    totals.compactions, totals.seconds = 2003, 4.0
    totals.tokens_evicted, totals.blocks_freed = 64_500, 2020
    now[0] = 150.0
    report.passed(["b", "c"])
    assert lines[-1].getMessage() == LINE
    assert lines[-1].levelno == logging.INFO
    report.passed(["b", "c"])
    assert len(lines) == 2


def test_one_line_for_each_thousand_passes_of_a_ledger(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="vllm.kvreclaim")
    lines = caplog.records
    monkeypatch.setattr(module, "EVERY", 10)
    ledger = make_ledger(budget=256, interval=32)
    report = Report(ledger.totals, ledger.pool)
    requests = [computed(ledger, f"r{number}", 300, 300) for number in range(3)]
    for _ in range(640):
        for request in requests:
            assert ledger.pool.grow(request.request_id, request.num_computed_tokens + 1)
            request.grow(1)
        ledger.compress(requests)
        report.passed(request.request_id for request in requests)
    assert ledger.totals.compactions > 50
    told = [int(re.findall(r"kvreclaim: (\d+) passes", line.getMessage())[0]) for line in lines]
    assert told == list(range(10, ledger.totals.compactions + 1, 10))
    had = sum(ledger.pool.places(request.request_id) for request in requests)
    shares = [int(re.findall(r"\((\d+) %", line.getMessage())[0]) for line in lines]
    assert abs(shares[-1] - 100 * ledger.totals.blocks_freed / had) <= 5
    assert shares == sorted(shares)
