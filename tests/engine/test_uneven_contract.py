"""The contract of policies with unequal counts: their results, their views, and refusals."""

from __future__ import annotations

import odd_policies
import pytest
import tiny
import torch
from settings import assert_idle, small

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError

GREEDY = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)


@pytest.fixture(autouse=True)
def _policies(monkeypatch):
    odd_policies.register(monkeypatch)


def heads(policy: str = "head-norm", **fields) -> CompressionConfig:
    return small(policy, **{"budget": 32, **fields})


def test_what_cannot_be_served_is_refused(make_llm):
    llm = make_llm(block_size=16)
    prompt = tiny.prompts((20,))
    with pytest.raises(InvalidArgumentError, match=r"interval is 15 tokens.*at least 16"):
        llm.generate(prompt, GREEDY, heads(interval=15))
    with pytest.raises(InvalidArgumentError, match=r"a sliding window that share .*, and layer 0"):
        make_llm("mistral").generate(prompt, GREEDY, heads(interval=16))
    with pytest.raises(InvalidArgumentError, match="is refused"):
        heads("shares(head-norm)")
    with pytest.raises(InvalidArgumentError, match="decides itself"):
        heads(mode="union")
    assert_idle(llm)


@pytest.mark.parametrize(("budget", "served"), [(40, 32), (41, 48), (48, 48), (17, 16), (15, 16)])
def test_a_budget_is_rounded_to_blocks_and_the_output_says_so(make_llm, caplog, budget, served):
    llm, prompts = make_llm(block_size=16), tiny.prompts((90,))
    with caplog.at_level("INFO", logger="kvreclaim"):
        (out,) = llm.generate(prompts, GREEDY, heads(budget=budget, interval=16))
    (exact,) = llm.generate(prompts, GREEDY, heads(budget=served, interval=16))
    assert out.outputs[0].token_ids == exact.outputs[0].token_ids
    assert out.metrics.budget == exact.metrics.budget == served
    assert (f"budget of {budget} tokens is served as {served}, in blocks of 16" in caplog.text) == (
        budget != served
    )
    (plain,) = llm.generate(prompts, GREEDY)
    assert plain.metrics.budget is None


def test_a_rounded_budget_has_a_place_beside_the_protected_tokens(make_llm):
    llm = make_llm(block_size=16)
    (out,) = llm.generate(tiny.prompts((90,)), GREEDY, heads(budget=18, interval=16, sinks=4, recent=13))
    assert (out.metrics.budget, out.error) == (32, None)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        (lambda shape, budget: torch.full((1, 1), float(budget)), r"counted \[1, 1\]"),
        (lambda shape, budget: torch.full(shape, float("nan")), "finite numbers"),
        (lambda shape, budget: torch.full(shape, budget + 2.0), "on average"),
    ],
)
def test_wrong_counts_fail_the_request(counts, message, make_llm, monkeypatch):
    monkeypatch.setattr(
        odd_policies.HeadNorm,
        "counts",
        lambda self, question: counts(question.limit.shape, question.budget),
    )
    llm = make_llm(block_size=8)
    (out,) = llm.generate(tiny.prompts((60,)), GREEDY, heads())
    assert out.outputs[0].finish_reason == "error"
    assert message.replace("\\", "") in out.error
    assert_idle(llm)


def test_the_second_pass_scores_head_by_head(make_llm, monkeypatch):
    """Later passes show one head at a time, with what belongs to it."""
    shapes = []
    score = odd_policies.HeadMixture.score

    def noted(self, view):
        shapes.append((view.source.shape[0], view.facts.num_heads, view.first, view.first_head))
        return score(self, view)

    monkeypatch.setattr(odd_policies.HeadMixture, "score", noted)
    llm = make_llm(block_size=8, max_num_batched_tokens=128)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    (out,) = llm.generate(tiny.prompts((60,)), params, heads("head-mixture"))
    assert out.metrics.compactions == 2
    assert shapes[:2] == [(2, 4, True, 0)] * 2
    assert shapes[2:] == [(1, 2, False, 0), (1, 2, False, 1)] * 2
