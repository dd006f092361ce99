"""Sliding windows beside compressed full attention in vLLM's V2 model runner, under Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import interpreted  # before anything that imports Triton

# isort: split
import pytest
from engines import Engine
from models import make_stats, random_prompts
from oracle import passes_of
from windowed import check_windowed, make_gemma

SETTINGS = {"budget": 96, "interval": 32, "sinks": 4, "recent": 16}


@pytest.mark.parametrize(
    ("policy", "asynchronous"), [("query_mixture", False), ("shares(query_mixture)", True)]
)
def test_logprobs_are_those_of_the_tokens_kept_in_full_layers(
    tmp_path: Path, policy: str, asynchronous: bool
) -> None:
    """A prompt is compressed between its chunks, a second one hits its first blocks and a third one, which is
    not compressed, gets the place of one of them."""
    interpreted.use_v2_runner()
    gemma = make_gemma(tmp_path / "gemma")
    stats = make_stats(gemma, tmp_path / "stats.safetensors")
    engine = Engine(
        gemma,
        compression={**SETTINGS, "policy": policy, "stats": str(stats)},
        num_blocks=60,
        chunk=128,
        batch=2,
        max_len=512,
        asynchronous=asynchronous,
        dtype="float32",
    )
    assert engine.config.use_v2_model_runner
    [head, tail, other] = random_prompts((250, 50, 70), seed=3)
    prompts, wanted = (head, head + tail, other), (None, {"budget": 64}, "off")
    with engine.traced() as trace:
        names = [engine.add(prompts[0], 40)]
        engine.step()
        names += [engine.add(prompts[1], 40, settings=wanted[1]), engine.add(prompts[2], 40, settings="off")]
        engine.run()
    for name, prompt, extra in zip(names, prompts, wanted, strict=True):
        answer, passes = engine.answer(name), passes_of(trace, name)
        assert answer.cached_tokens == (128 if prompt is prompts[1] else 0)
        assert not passes if extra == "off" else len(passes) >= 2
        check_windowed(gemma, prompt, answer, passes)
    assert engine.is_empty()
    engine.close()
