"""Host work of a decode step, counted: calls of Python functions, for all sequences and for one more."""

from __future__ import annotations

import pytest
from settings import small

from kvreclaim import LLM, SamplingParams, demo_model
from kvreclaim.bench.host_steps import python_calls, without_forward

STEPS = 16
"""Steps, as many as a block has tokens: each sequence takes one block in them."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
MOST = {None: (1010, 29), "ada_kv(knorm)": (1370, 40)}
"""The most calls of a step of 32 sequences, and of each sequence more, by policy."""


def mean_calls(num_seqs: int, policy: str | None) -> float:
    """Calls per decode step between two passes. Each step some sequences take a block."""
    compression = None if policy is None else small(policy, budget=48, interval=48)
    llm = LLM(
        demo_model(),
        dtype="float32",
        device="cpu",
        num_blocks=20 * num_seqs,
        block_size=STEPS,
        max_num_seqs=num_seqs,
        max_num_batched_tokens=128 * num_seqs,
        max_model_len=256,
        compression=compression,
    )
    compressor = None if compression is None else llm.compressor(compression)
    engine, lengths = llm.engine, [100 + i % STEPS for i in range(num_seqs)]
    for name, prompt in enumerate([[2 + (7 * i + j) % 250 for j in range(n)] for i, n in enumerate(lengths)]):
        engine.add_request(str(name), prompt, PARAMS, compressor)
    with without_forward(llm) as graphs:
        for _ in range(4):
            engine.step()
        counts = []
        for _ in range(STEPS):
            passes, count = engine.totals.compactions, python_calls(engine.step)
            counts += [count] if engine.totals.compactions == passes else []
    assert not graphs.refusals
    assert engine.totals.compactions >= (0 if policy is None else num_seqs)
    assert engine.totals.generation_tokens == (4 + STEPS) * num_seqs
    assert len(counts) >= STEPS // 2
    return sum(counts) / len(counts)


@pytest.mark.parametrize("policy", MOST)
def test_a_decode_step_makes_few_calls_for_each_sequence(policy: str | None) -> None:
    few, many = mean_calls(32, policy), mean_calls(64, policy)
    most, most_each = MOST[policy]
    assert few <= most
    assert (many - few) / 32 <= most_each
