"""A small part of docs/evidence.md on the language model itself: which heads get the memory decides. Fixed
documents and no sampling; what is asserted has several times the room that other machines need."""

from __future__ import annotations

from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvreclaim
from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.compression.policies.surrogate import Surrogate
from kvreclaim.eval import TaskOptions, evaluate
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.example import accuracy


@pytest.fixture(scope="module")
def llm(real_dir):
    return LLM(real_dir, device="cpu", num_blocks=400, max_num_batched_tokens=2048)


@pytest.fixture(scope="module")
def needles(llm):
    """policy -> its row: 64 to 96 digits, a fifth of the tokens, a pass behind the prompt and one while the
    answers are computed."""
    policies = [
        "full",
        "shares(surrogate)",
        "shares(random, by=static)",
        "surrogate",
    ]
    options = TaskOptions(num_tokens=1280)
    report = evaluate(llm, policies, [0.2], ["needles"], options=options, num_examples=2)
    assert {row.status for row in report.rows} == {"ok"}
    return {row.policy: row for row in report.rows}


def test_a_fifth_of_the_cache_keeps_the_codes_where_heads_share_it(needles):
    full, ours = needles["full"].accuracy, needles["shares(surrogate)"].accuracy
    assert full > 0.75
    assert ours > 0.85 * full
    assert needles["shares(surrogate)"].compactions >= 4
    assert needles["shares(surrogate)"].kv_bytes < 0.35 * needles["full"].kv_bytes


def test_equal_heads_lose_many_of_them(needles):
    assert needles["surrogate"].accuracy < 0.75 * needles["full"].accuracy
    assert needles["surrogate"].kv_bytes == pytest.approx(needles["shares(surrogate)"].kv_bytes, rel=0.05)


def test_even_random_tokens_do_better_with_shares_than_the_best_of_equal_heads(needles):
    assert needles["shares(random, by=static)"].accuracy > needles["surrogate"].accuracy + 0.1


def test_every_head_holds_the_system_prompt_of_a_long_chat(llm, monkeypatch):
    """A tenth of 2,000 tokens stays; the 90 heads differ in what they hold beside it."""
    seen, score = [], Surrogate.score_many

    def watching(self, views):
        seen.extend(view.signals.positions[0].tolist() for view in views if not view.first)
        return score(self, views)

    monkeypatch.setattr(Surrogate, "score_many", watching)
    rule = {"role": "system", "content": "Never tell anybody the code of the vault, which is 7391-KESTREL."}
    turns = [
        {
            "role": role,
            "content": f"Note {i}: the ferry leaves at dawn with apples, letters and {i * 37} ropes.",
        }
        for i in range(36)
        for role in ("user", "assistant")
    ]
    config = CompressionConfig("shares(surrogate)", budget=208, interval=16, recent=64)
    (out,) = llm.chat([rule, *turns], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True), config)
    assert len(out.prompt_token_ids) > 1900
    assert len(seen) == 90
    assert len({len(held) for held in seen}) > 3
    assert "7391-KESTREL" in llm.tokenizer.decode(out.prompt_token_ids[: out.metrics.sinks])
    assert all(set(range(out.metrics.sinks)) <= {*held} for held in seen)


@pytest.fixture(scope="module")
def network() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(kvreclaim.demo_model(), dtype=torch.float32).eval()


@torch.inference_mode()
def full_cache_accuracy(network: torch.nn.Module, name: str, num_tokens: int, num_examples: int) -> float:
    task = DEMO_TASKS[name]
    examples = [task.make(num_tokens).sample(seed) for seed in range(num_examples)]
    scores = []
    for example in examples:
        logits = network(torch.tensor([example.document]), use_cache=False).logits
        guesses = logits[0, len(example.prompt) - 1 : -1].argmax(-1).tolist()
        scores.append(accuracy(example, guesses, task.judged))
    return mean(scores)


@pytest.mark.parametrize("name", DEMO_TASKS)
def test_short_documents(network, name):
    assert full_cache_accuracy(network, name, 512, 4) >= 0.95


@pytest.mark.slow("thirty-two documents of 4,096 tokens; short ones are always run")
def test_99_percent_at_4096_tokens(network):
    scores = {name: full_cache_accuracy(network, name, 4096, 8) for name in DEMO_TASKS}
    assert mean(scores.values()) >= 0.99, scores
    assert min(scores.values()) >= 0.97, scores
