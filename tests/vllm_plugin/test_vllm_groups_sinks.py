"""Sliding windows beside compressed full attention in a model whose query heads have sinks, as GPT-OSS."""

from __future__ import annotations

from pathlib import Path

from engines import Engine
from models import random_prompts
from oracle import passes_of
from windowed import check_windowed, make_gpt_oss


def test_logprobs_are_those_of_the_tokens_kept_in_full_layers(tmp_path: Path) -> None:
    model = make_gpt_oss(tmp_path / "gpt-oss")
    settings = {"policy": "keydiff", "budget": 128, "interval": 64, "sinks": 4, "recent": 32}
    engine = Engine(model, compression=settings, num_blocks=60, chunk=128, dtype="float32")
    prompts, wanted = random_prompts((400, 300), seed=1), (None, "off")
    with engine.traced() as trace:
        names = [
            engine.add(prompt, 100, settings=extra) for prompt, extra in zip(prompts, wanted, strict=True)
        ]
        engine.run()
    for name, prompt, extra in zip(names, prompts, wanted, strict=True):
        passes = passes_of(trace, name)
        assert not passes if extra == "off" else len(passes) >= 3
        check_windowed(model, prompt, engine.answer(name), passes)
    assert engine.is_empty()
    engine.close()
