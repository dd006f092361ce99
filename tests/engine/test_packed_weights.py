"""Packed weights beside everything that an engine does: company decides about no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import tiny_packed

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.ops import extension

pytestmark = pytest.mark.skipif(
    extension.unavailable_reason() is not None, reason="the native extension is not there"
)
SHARED = tiny.prompts((28,), seed=7)[0]
PROMPTS = [*tiny.prompts((5, 31, 18, 32), seed=1), *([*SHARED, i, 2 * i + 1] for i in range(3))]
SAMPLING = [SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)] * 4 + [
    SamplingParams(temperature=1.0, seed=3, n=2, max_tokens=40, ignore_eos=True)
] * 3
# Budgets hold every prompt, so that passes come while tokens are generated, whatever the chunks of prompts
# are; the pool is scarce where there are none, which a pool without room would postpone.
WAYS = {
    "full": None,
    "lagkv": CompressionConfig("lagkv", 32, interval=8, sinks=2, recent=4),
    "uneven": CompressionConfig("ada_kv(knorm)", 32, interval=8, sinks=2, recent=4),
}


@pytest.fixture(scope="module", params=["awq", "bitsandbytes", "gguf"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp(request.param)
    if request.param != "gguf":
        tiny_packed.write(request.param, directory)
        return directory
    tiny_gguf.write(directory / "tiny.gguf")
    return directory / "tiny.gguf"


def answers(llm: LLM, way: CompressionConfig | None, together: bool) -> list[Any]:
    """The tokens of each answer of every prompt."""
    batches = [range(len(PROMPTS))] if together else [[i] for i in range(len(PROMPTS))]
    outputs = [
        output
        for batch in batches
        for output in llm.generate([PROMPTS[i] for i in batch], [SAMPLING[i] for i in batch], way)
    ]
    assert all(output.error is None for output in outputs)
    return [[each.token_ids for each in output.outputs] for output in outputs]


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("way", WAYS)
def test_company_and_preemption_change_nothing(
    model: Path, way: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVRECLAIM_HOME", str(tmp_path))
    common = {"dtype": dtype, "block_size": 4, "max_model_len": 128}
    alone = LLM(model, num_blocks=400, enable_prefix_caching=False, **common)
    want = answers(alone, WAYS[way], together=False)
    scarce = WAYS[way] is None
    crowded = alone.sibling(
        num_blocks=48 if scarce else 200,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        enable_prefix_caching=True,
    )
    assert answers(crowded, WAYS[way], together=True) == want
    assert (crowded.engine.totals.num_preemptions > 0) == scarce
    assert crowded.engine.memory.stats().prefix_hit_tokens > 0
    assert (crowded.engine.totals.compactions > 0) == (not scarce)
