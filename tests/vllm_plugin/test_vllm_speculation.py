"""Speculative decoding beside compression: passes fall where they fall without drafts, keep the same tokens,
and requests say the same, also after preemption, over a prefix hit and with unequal heads. The own
layers of a draft model or an EAGLE head are compressed alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle import make_target_and_head
from engines import Answer, Engine
from models import make_tiny_model, random_prompts
from oracle import Kept, logprobs_with_drops, passes_of

from kvreclaim.integrations.vllm import family

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS = {"budget": 128, "interval": 48, "sinks": 4, "recent": 32}
OUTPUT = 200
WANTED: tuple[Any, ...] = (None, {"policy": "streaming_llm", "interval": 33}, {"policy": "knorm"}, "off")
WAYS = ["ngram"] if family.find_family().drafter is None else ["itself", "small", "ngram"]
"""N-grams last: vLLM makes no engine in a process that has loaded numba."""
PROMPTS = random_prompts((150, 190, 70, 100), seed=11)


@dataclass(frozen=True, slots=True)
class Said:
    """What the requests came to, and what drafts came to meanwhile.

    steady: drafts rejected of each request, but in steps with a pass of it: these were drafted before it
    """

    answers: list[Answer]
    passes: list[list[Kept]]
    verified: int
    accepted: int
    steady: list[int]


def run(engine: Engine, prompts: Sequence[list[int]], wanted: Sequence[Any]) -> Said:
    counts, rejected = [0, 0], Counter[str]()
    inner, ledger = engine.scheduler.make_spec_decoding_stats, engine.scheduler.reclaim
    sent, message = set[str](), ledger.message

    def count(
        stats: Any, num_draft_tokens: int, num_accepted_tokens: int, request_id: str, **more: Any
    ) -> Any:
        counts[0] += num_draft_tokens
        counts[1] += num_accepted_tokens
        if request_id not in sent:
            rejected[request_id.rpartition("-")[0]] += num_draft_tokens - num_accepted_tokens
        return inner(stats, num_draft_tokens, num_accepted_tokens, request_id=request_id, **more)

    def send(passes: Any) -> Any:
        found = message(passes)
        sent.clear()
        sent.update(done.seq_id for done in (found.passes if found else ()))
        return found

    engine.scheduler.make_spec_decoding_stats, ledger.message = count, send
    with engine.traced() as trace:
        names = [
            engine.add(prompt, OUTPUT, settings=asked) for prompt, asked in zip(prompts, wanted, strict=True)
        ]
        engine.run()
    del engine.scheduler.make_spec_decoding_stats, ledger.message
    answers = [engine.answer(name) for name in names]
    passes = [passes_of(trace, name) for name in names]
    return Said(answers, passes, *counts, [rejected[name] for name in names])


def serve(model: Path, speculative: dict[str, Any] | None) -> Engine:
    more = {} if speculative is None else {"speculative_config": speculative}
    return Engine(model, compression={"policy": "shares(knorm)", **SETTINGS}, dtype="float32", **more)


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
def plain(tiny_model: Path) -> list[Said]:
    """Without drafts: once, and once more over the prefix cache."""
    engine = serve(tiny_model, None)
    said = [run(engine, PROMPTS, WANTED) for _ in range(2)]
    engine.close()
    return said


@dataclass(frozen=True, slots=True)
class Drafted:
    """The same with drafts, and a request that is preempted."""

    way: str
    said: list[Said]
    preempted: Any


@pytest.fixture(scope="module", params=WAYS)
def drafted(request: pytest.FixtureRequest, tiny_model: Path, plain: list[Said]) -> Drafted:
    """The draft model is the target itself, or one whose heads have another shape and guess nothing right.

    plain: made before
    """
    small = make_tiny_model(tiny_model.with_name("small"), layers=1, kv_heads=1, head_dim=32, hidden=64)
    drafter = {"method": "draft_model", "num_speculative_tokens": 3}
    ways = {
        "ngram": NGRAM,
        "itself": drafter | {"model": str(tiny_model)},
        "small": drafter | {"model": str(small)},
    }
    engine = serve(tiny_model, ways[request.param])
    said = [run(engine, PROMPTS, WANTED) for _ in range(2)]
    found = Drafted(request.param, said, preempted(engine))
    assert engine.is_empty()
    engine.close()
    return found


@pytest.mark.skipif(len(WAYS) == 1, reason="no EAGLE heads beside compression in this version")
def test_an_eagle_head(tmp_path: Path) -> None:
    """Answers are what the tokens kept say; a head that sees what the target sees drafts mostly right."""
    target, head = make_target_and_head(tmp_path)
    drafter = {"method": "eagle", "model": str(head), "num_speculative_tokens": 3}
    engine = Engine(
        target, compression={"policy": "knorm", **SETTINGS}, dtype="float32", speculative_config=drafter
    )
    said = run(engine, PROMPTS, (None, {"policy": "streaming_llm"}, None, "off"))
    assert engine.is_empty()
    engine.close()
    assert [len(passes) >= 3 for passes in said.passes] == [True, True, True, False]
    assert said.accepted > said.verified / 2
    for prompt, answer, passes in zip(PROMPTS, said.answers, said.passes, strict=True):
        wanted = logprobs_with_drops(target, prompt, answer.tokens, passes)
        torch.testing.assert_close(answer.logprobs, wanted, rtol=0, atol=1e-3)


def test_passes_and_answers_are_those_without_drafts(drafted: Drafted, plain: list[Said]) -> None:
    ours, theirs = drafted.said[0], plain[0]
    assert all(len(passes) >= 3 for passes in theirs.passes[:3])
    assert ours.accepted < ours.verified, "drafts are rejected"
    assert drafted.way == "small" or ours.accepted > 0, "and accepted"
    assert theirs.verified == 0
    check_equal(ours, theirs)


def test_over_a_prefix_hit(drafted: Drafted, plain: list[Said]) -> None:
    assert any(answer.cached_tokens for answer in drafted.said[1].answers)
    check_equal(drafted.said[1], plain[1])


def test_after_preemption(drafted: Drafted, tiny_model: Path) -> None:
    """Passes fall elsewhere then; what is said is what the tokens kept say, before and after."""
    (before, passes, again), answer = drafted.preempted
    assert len(again) >= 2
    wanted = [logprobs_with_drops(tiny_model, PROMPTS[0], answer.tokens, kept) for kept in (passes, again)]
    wanted = torch.cat([wanted[0][:before], wanted[1][before:]])
    torch.testing.assert_close(answer.logprobs, wanted, rtol=0, atol=1e-2)


@pytest.mark.parametrize("drafted", WAYS[:-2], indirect=True)
def test_a_drafter_that_is_the_target_says_what_the_target_says(drafted: Drafted) -> None:
    """Under a policy that both can follow its layers hold the same tokens, in the same slots."""
    for said in drafted.said:
        unequal, *others = said.steady
        assert others == [0, 0, 0]
        assert unequal > 0, "the drafter keeps other tokens where heads are unequal, so this can fail"
