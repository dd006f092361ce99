"""The soak at a small size; `make soak` runs it with 1,000 requests of 64 clients."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvreclaim import LLM, demo_model

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_blocks", "compress"), [(2048, True), (80, False)], ids=["compressing", "preempting"]
)
def test_every_answer_is_the_one_that_it_gets_alone(monkeypatch, num_blocks: int, compress: bool) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from soak import KEYS, soak
    from soak_cases import make_cases

    llm, alone = (LLM(demo_model(), num_blocks=blocks, max_num_seqs=64) for blocks in (num_blocks, 2048))
    cases = make_cases(1, 120, KEYS, compress=compress)
    report = asyncio.run(soak(llm, alone, cases, num_clients=24))
    assert not report.violations
    assert report.outcomes["finished, greedy, as alone"] > 40
    assert report.outcomes["refused"] > 0
    assert report.outcomes["left by its client"] > 0
    assert (report.facts["compactions"] > 0) == compress
    assert (report.facts["preemptions"] > 0) == (not compress)
