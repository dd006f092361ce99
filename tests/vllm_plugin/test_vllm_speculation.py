"""Speculative decoding beside compression: passes fall where they fall without drafts, keep the same tokens,
and requests say the same, also after preemption, over a prefix hit and with unequal heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine
from models import random_prompts
from oracle import Kept, logprobs_with_drops, passes_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS = {"budget": 128, "interval": 48, "sinks": 4, "recent": 32}
OUTPUT = 200
WANTED: tuple[Any, ...] = (None, {"policy": "streaming_llm", "interval": 33}, {"policy": "knorm"}, "off")
PROMPTS = random_prompts((150, 190, 70, 100), seed=11)


@dataclass(frozen=True, slots=True)
class Said:
    """What the requests came to, and what drafts came to meanwhile."""

    answers: list[Answer]
    passes: list[list[Kept]]
    verified: int
    accepted: int


def run(engine: Engine, prompts: Sequence[list[int]], wanted: Sequence[Any]) -> Said:
    counts = [0, 0]
    inner = engine.scheduler.make_spec_decoding_stats

    def count(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, *args: Any, **more: Any) -> Any:
        counts[0] += num_draft_tokens
        counts[1] += num_accepted_tokens
        return inner(stats, num_draft_tokens, num_accepted_tokens, *args, **more)

    engine.scheduler.make_spec_decoding_stats = count
    with engine.traced() as trace:
        names = [
            engine.add(prompt, OUTPUT, settings=asked) for prompt, asked in zip(prompts, wanted, strict=True)
        ]
        engine.run()
    del engine.scheduler.make_spec_decoding_stats
    answers = [engine.answer(name) for name in names]
    passes = [passes_of(trace, name) for name in names]
    return Said(answers, passes, *counts)


def serve(model: Path, speculative: dict[str, Any] | None, compression: dict[str, Any], blocks: int) -> Any:
    more = {} if speculative is None else {"speculative_config": speculative}
    return Engine(model, compression=compression, num_blocks=blocks, dtype="float32", **more)


def check_equal(ours: Said, plain: Said) -> None:
    for answer, other, passes, others in zip(
        ours.answers, plain.answers, ours.passes, plain.passes, strict=True
    ):
        assert [kept.num_computed for kept in passes] == [kept.num_computed for kept in others]
        for kept, same in zip(passes, others, strict=True):
            assert torch.equal(kept.positions, same.positions)
        assert answer.tokens == other.tokens
        torch.testing.assert_close(answer.logprobs, other.logprobs, rtol=0, atol=1e-3)


def preempted(engine: Engine) -> tuple[tuple[int, list[Kept], list[Kept]], Answer]:
    """The first request, preempted after some passes. Returns: (tokens said before, passes before, passes
    afterwards), and its answer."""
    with engine.traced() as traces:
        name = engine.add(PROMPTS[0], OUTPUT)
        while len(engine.runner.reclaim.trace.passes) < 3:
            engine.step()
        [request] = engine.scheduler.running
        before, count = len(request.output_token_ids), len(engine.runner.reclaim.trace.passes)
        with engine.counted_preemptions() as names:
            assert engine.scheduler.reset_prefix_cache(reset_running_requests=True)
        assert len(names) == 1
        engine.run()
    passes = passes_of(traces, name)
    return (before, passes[:count], passes[count:]), engine.answer(name)


@pytest.fixture(scope="module")
def both(tiny_model: Path) -> dict[str, Any]:
    """Without drafts, and with: once, once more over the prefix cache, and a request that is preempted."""
    said: dict[str, Any] = {}
    compression = {"policy": "shares(knorm)", **SETTINGS}
    for name, speculative in (("plain", None), ("ngram", NGRAM)):
        engine = serve(tiny_model, speculative, compression, 130)
        said[name] = run(engine, PROMPTS, WANTED)
        said[f"{name} again"] = run(engine, PROMPTS, WANTED)
        if speculative is not None:
            said["preempted"], said["preempted answer"] = preempted(engine)
        assert engine.is_empty()
        engine.close()
    return said


def test_passes_and_answers_are_those_without_drafts(both: dict[str, Any]) -> None:
    ours, plain = both["ngram"], both["plain"]
    assert all(len(passes) >= 3 for passes in plain.passes[:3])
    assert 0 < ours.accepted < ours.verified, "drafts are accepted and rejected"
    assert plain.verified == 0
    check_equal(ours, plain)


def test_over_a_prefix_hit(both: dict[str, Any]) -> None:
    assert any(answer.cached_tokens for answer in both["ngram again"].answers)
    check_equal(both["ngram again"], both["plain again"])


def test_after_preemption(both: dict[str, Any], tiny_model: Path) -> None:
    """Passes fall elsewhere then; what is said is what the tokens kept say, before and after."""
    before, passes, again = both["preempted"]
    assert len(again) >= 2
    prompt, answer = PROMPTS[0], both["preempted answer"]
    wanted = [logprobs_with_drops(tiny_model, prompt, answer.tokens, kept) for kept in (passes, again)]
    wanted = torch.cat([wanted[0][:before], wanted[1][before:]])
    torch.testing.assert_close(answer.logprobs, wanted, rtol=0, atol=1e-2)
