"""A measured loss is what greedy decoding under the budget would get wrong."""

from __future__ import annotations

import pytest
import tiny
from settings import assert_idle

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.curve import CurveDocument, budgets, measure_curve
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import Trial, TrialOutcome, TrialScore
from kvreclaim.model_paths import STATS_FILE

PROMPTS = tiny.prompts((300,) * 19, seed=8)


@pytest.fixture(scope="module")
def llm(calibrated_dir) -> LLM:
    options = {"dtype": "float32", "device": "cpu", "spread_compression": False}
    return LLM(calibrated_dir("llama"), num_blocks=128, **options)


@pytest.fixture(scope="module")
def stats(calibrated_dir) -> QueryStats:
    score = {"once": 1.0, "once_right": 0.5, "again": 1.0, "again_right": 0.5}
    row = TrialOutcome(policy="knorm", fraction=0.2, budget=60, **score)
    trial = Trial(documents=1, tokens=300, full=TrialScore(**score), outcomes=(row,))
    return QueryStats.load(calibrated_dir("llama") / STATS_FILE).with_trial(trial)


def test_losses_are_answers_that_only_the_full_cache_gives(llm, stats, calibrated_dir) -> None:
    """All but the last token are what the full cache says itself. Answers are the first 8 tokens, each by
    itself, and the others in pairs."""
    size = 24
    full = tiny.greedy(calibrated_dir("llama"), PROMPTS, size)
    documents = []
    for prompt, said in zip(PROMPTS, full, strict=True):
        answers = [range(i, i + 1) for i in range(8)] + [range(i, i + 2) for i in range(8, size, 2)]
        documents.append(CurveDocument("prose", prompt, [*said[:-1], said[-1] ^ 1], answers))
    curve = measure_curve(llm, stats, documents)
    (cell,) = curve.cells
    assert (curve.policy, cell.content, cell.num_tokens, cell.right) == ("knorm", "prose", 300, 15 / 16)
    assert cell.budgets == tuple(budgets(300, 16)) == (144, 176, 224, 256)
    for document, losses in zip(documents, cell.losses, strict=True):
        for budget, loss in zip(cell.budgets, losses, strict=True):
            (out,) = llm.score([document.prompt], [document.continuation], CompressionConfig("knorm", budget))
            wrong = {i for i in range(size) if out.predicted[i] != document.continuation[i]}
            lost = sum(bool(wrong & set(answer)) for answer in document.answers[:-1])
            assert loss == pytest.approx(lost / len(document.answers))
    assert any(any(losses) for losses in cell.losses)
    assert_idle(llm)
