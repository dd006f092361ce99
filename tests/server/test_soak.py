"""The soak at a small size; `make soak` runs it with 10,000 requests of 64 clients and an attack."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvreclaim import LLM, demo_model
from kvreclaim.engine.serving.messages import EngineSpec
from kvreclaim.engine.serving.process import ProcessEngine
from kvreclaim.engine.serving.thread import AsyncEngine

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.mark.parametrize(
    ("num_blocks", "compress"), [(2048, True), (80, False)], ids=["compressing", "preempting"]
)
@pytest.mark.parametrize("where", ["process", "thread"])
def test_every_answer_is_the_one_that_it_gets_alone(
    monkeypatch, num_blocks: int, compress: bool, where: str
) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    from soak import KEYS, soak
    from soak_cases import make_cases

    spec = EngineSpec(model=str(demo_model()), options={"num_blocks": num_blocks, "max_num_seqs": 64})
    engine = ProcessEngine.launch(spec) if where == "process" else AsyncEngine(spec.load())
    alone = LLM(demo_model(), num_blocks=2048, max_num_seqs=64)
    cases = make_cases(1, 120, KEYS, compress=compress)
    report = asyncio.run(soak(engine, alone, cases, num_clients=24))
    assert not report.violations
    assert report.outcomes["finished, greedy, as alone"] > 40
    assert report.outcomes["refused"] > 0
    assert report.outcomes["left by its client"] > 0
    assert (report.facts["compactions"] > 0) == compress
    assert (report.facts["preemptions"] > 0) == (not compress)
