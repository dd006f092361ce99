"""Prompts whose beginning is compressed before the rest is known."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from guess import SMALL, Guess

from kvreclaim import LLM, CompressionConfig
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.eval import Answer, evaluate

QUESTION = 12
ALONE = {**SMALL, "num_examples": 1}


@dataclass(frozen=True)
class Asked(Guess):
    """The last tokens of the prompt are a question."""

    name: str = "asked"

    def item(self, seed, index):
        item = super().item(seed, index)
        return replace(item, compress_at=len(item.prompt) - QUESTION)


@pytest.fixture(scope="module")
def llm(tiny_dir):
    return LLM(tiny_dir("llama"), dtype="float32", device="cpu", num_blocks=100)


def test_a_cell_is_what_an_engine_says_that_compresses_there(llm):
    item = Asked().item(0, 0)
    prompt = {"prompt_token_ids": list(item.prompt), "compress_prompt_at": item.compress_at}
    config = CompressionConfig("knorm", 48, interval=16, sinks=2, recent=8)
    (out,) = llm.score([prompt], [list(item.continuation)], config)
    report = evaluate(llm, ["full", "knorm"], [0.3], [Asked()], **ALONE)
    score = Asked().judge(item, Answer(tuple(out.predicted)))
    assert report.row("knorm", "asked").value == score.points / score.out_of
    assert report.row("knorm", "asked").tokens_evicted == out.metrics.tokens_evicted


def test_the_first_pass_sees_the_document_alone(llm, monkeypatch):
    seen, score = [], Knorm.score_many

    def noted(self, views):
        seen.extend(view.logical_len for view in views)
        return score(self, views)

    monkeypatch.setattr(Knorm, "score_many", noted)
    evaluate(llm, ["knorm"], [0.3], [Asked()], **ALONE)
    assert seen[0] == Asked().item(0, 0).compress_at


def test_all_policies_and_budgets_share_one_computation_of_the_document(llm):
    before = llm.stats().totals.prompt_tokens
    report = evaluate(llm, ["full", "knorm", "streaming_llm"], [0.4, 0.3], [Asked()], **ALONE)
    assert {row.status for row in report.rows} == {"ok"}
    computed = llm.stats().totals.prompt_tokens - before
    num_prompt, block = len(Asked().item(0, 0).prompt), llm.engine.config.block_size
    assert num_prompt < computed <= num_prompt + 5 * (QUESTION + block)
