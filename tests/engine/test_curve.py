"""A measured loss is what sampling under the budget is expected to get wrong more often."""

from __future__ import annotations

import math
from statistics import mean
from typing import Any

import pytest
import tiny
import torch
from settings import assert_idle
from transformers import PreTrainedModel

from kvreclaim import LLM, CompressionConfig
from kvreclaim.calibrate.curve import CurveDocument, budgets, measure_curve
from kvreclaim.compression.stats import QueryStats
from kvreclaim.compression.trial import Trial, TrialOutcome, TrialScore
from kvreclaim.errors import UnsupportedModelError
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


def test_losses_are_the_fall_of_the_answers_probability(llm, stats, calibrated_dir) -> None:
    """The answers are those of the full cache itself: the first 8 tokens, each alone, and the others in
    pairs."""
    size = 24
    full = tiny.greedy(calibrated_dir("llama"), PROMPTS, size)
    documents = []
    for prompt, continuation in zip(PROMPTS, full, strict=True):
        answers = [range(i, i + 1) for i in range(8)] + [range(i, i + 2) for i in range(8, size, 2)]
        documents.append(CurveDocument("prose", prompt, continuation, answers))
    curve = measure_curve(llm, stats, documents, ("int8", "int4"))
    assert curve.policy == "knorm"
    assert curve.formats == ("auto", "int8", "int4")
    model = tiny.load_oracle(calibrated_dir("llama"))
    right = [_probability(model, document) for document in documents]
    assert tuple(budgets(300, 16)) == (144, 176, 224, 256)
    for cell in curve.cells:
        form = cell.kv_cache_dtype
        coded = llm.sibling(kv_cache_dtype=form, stats=stats)
        assert (cell.content, cell.num_tokens) == ("prose", 300)
        assert cell.density == {"auto": 1, "int8": 128 / 35, "int4": 128 / 20}[form]
        assert cell.right == pytest.approx(mean(right), abs=1e-5)
        assert cell.budgets == (144, 176, 224, 256, *([] if form == "auto" else [300]))
        for document, whole, losses in zip(documents, right, cell.losses, strict=True):
            for budget, loss in zip(cell.budgets, losses, strict=True):
                config = CompressionConfig("knorm", budget) if budget < 300 else None
                (out,) = coded.score([document.prompt], [document.continuation], config)
                left = mean(math.exp(sum(out.logprobs[i] for i in answer)) for answer in document.answers)
                assert loss == pytest.approx(max(0.0, whole - left), abs=1e-5)
        assert any(losses[-1] for losses in cell.losses)  # the rounding alone, in a coded format
        assert_idle(coded)


def test_a_format_that_the_model_cannot_have_is_left_out(llm, stats, monkeypatch, caplog) -> None:
    sibling = LLM.sibling

    def picky(self: LLM, **options: Any) -> LLM:
        if options["kv_cache_dtype"] == "int4":
            raise UnsupportedModelError("no int4 here.")
        return sibling(self, **options)

    monkeypatch.setattr(LLM, "sibling", picky)
    documents = [CurveDocument("prose", prompt, [5, 6], [range(2)]) for prompt in PROMPTS]
    assert measure_curve(llm, stats, documents, ("int4", "int8")).formats == ("auto", "int8")
    assert "no loss is measured in kv_cache_dtype int4: no int4 here." in caplog.text


@torch.inference_mode()
def _probability(model: PreTrainedModel, document: CurveDocument) -> float:
    """Mean probability of an answer in transformers with the full cache."""
    logits = model(torch.tensor([document.prompt + document.continuation])).logits[0]
    rows = logits[len(document.prompt) - 1 : -1].log_softmax(-1)
    logprobs = rows[torch.arange(len(rows)), document.continuation]
    return mean(logprobs[each.start : each.stop].sum().exp().item() for each in document.answers)
