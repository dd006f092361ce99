"""A tiny model, and an evaluation of it."""

from __future__ import annotations

import pytest
from guess import POLICIES, SMALL, Guess

from kvreclaim import LLM
from kvreclaim.eval import evaluate


@pytest.fixture(scope="module")
def model(tiny_dir):
    return tiny_dir("llama")


@pytest.fixture(scope="module")
def llm(model):
    return LLM(model, dtype="float32", device="cpu", num_blocks=100)


@pytest.fixture(scope="module")
def report(llm):
    return evaluate(llm, POLICIES, [0.5, 0.3], [Guess()], seeds=[0, 1], **SMALL)
