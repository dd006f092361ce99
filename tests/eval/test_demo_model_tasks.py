"""The shipped model does its tasks with the full cache: transformers runs it, the demo tasks judge it."""

from statistics import mean

import pytest
import torch
from transformers import AutoModelForCausalLM

import kvreclaim
from kvreclaim.eval.demo_tasks import DEMO_TASKS
from kvreclaim.eval.example import accuracy


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
