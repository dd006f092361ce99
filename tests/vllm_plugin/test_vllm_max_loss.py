"""An engine with max_loss: the loss curve chooses each request's budget, or keeps everything of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Engine
from models import random_prompts
from vllm.exceptions import VLLMValidationError

from kvreclaim.compression.loss_curve import LossCell, LossCurve
from kvreclaim.compression.stats import QueryStats

NEW = 160
BUDGET = 256


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tiny_stats: Path) -> Iterator[Engine]:
    cell = LossCell(content="prose", num_tokens=512, right=1.0, budgets=(BUDGET,), losses=((0.05,),) * 19)
    path = tiny_stats.with_name("curve.safetensors")
    QueryStats.load(tiny_stats).with_curve(LossCurve(policy="knorm", cells=(cell,))).save(path)
    engine = Engine(tiny_model, compression={"max_loss": 0.05, "stats": str(path)})
    yield engine
    engine.close()


def test_the_prompts_length_and_the_loss_choose_the_budget(engine: Engine) -> None:
    short, long = random_prompts((500, 600), seed=5)
    [measured] = engine.generate([short], NEW)
    assert measured.figures["compactions"] > 0
    assert BUDGET <= measured.figures["kv_tokens"] < BUDGET + 128
    assert measured.figures["promised"] == f"max_loss 0.05: {BUDGET} tokens"
    for prompt, loss in ((long, 0.05), (short, 0.01)):
        [whole] = engine.generate([prompt], NEW, settings={"max_loss": loss})
        assert whole.figures["promised"] == f"max_loss {loss}: everything"
        assert whole.figures["kv_tokens"] == len(prompt) + NEW - 1
        assert not any(whole.figures[name] for name in ("budget", "tokens_evicted", "compactions"))
    totals = engine.scheduler.reclaim.totals
    assert (totals.compressed, totals.whole) == (1, 2)
    assert totals.kept_tokens == totals.promised_tokens == BUDGET
    [smaller] = engine.generate([long], NEW, settings={"budget": 192})
    assert 192 <= smaller.figures["kv_tokens"] < 192 + 128
    with pytest.raises(VLLMValidationError, match="content is 'code'"):
        engine.add(short, NEW, settings={"content": "code"})
