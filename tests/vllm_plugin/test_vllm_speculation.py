"""Speculative decoding beside compression: passes fall where they fall without drafts, keep the same tokens,
and answers are the same, also after preemption, over a prefix hit, with unequal heads, and scheduled
asynchronously. The own layers of a draft model, an EAGLE head or an MTP layer are compressed alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import Answer, Engine
from heads import Heads, make_heads
from models import make_tiny_model, random_prompts
from oracle import Kept, logprobs_with_drops, passes_of

NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
SETTINGS = {"budget": 128, "interval": 48, "sinks": 4, "recent": 32}
OUTPUT = 200
WANTED: tuple[Any, ...] = (None, {"policy": "streaming_llm", "interval": 33}, {"policy": "knorm"}, "off")
HEADS = ("eagle", "eagle3", "mtp")
WAYS = ["itself", "small", *HEADS, "ngram"]
"""N-grams last: vLLM makes no engine in a process that has loaded numba."""
ASYNCHRONOUS = ("small", "mtp")
PROMPTS = random_prompts((150, 190, 70, 100), seed=11)


@dataclass(frozen=True, slots=True)
class Served:
    """Answers and passes of the requests, and how many draft tokens were verified and accepted.

    steady: drafts rejected of each request, but in steps with a pass of it: these were drafted before it
    """

    answers: list[Answer]
    passes: list[list[Kept]]
    verified: int
    accepted: int
    steady: list[int]


def run(engine: Engine, prompts: Sequence[list[int]], wanted: Sequence[Any]) -> Served:
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
        outgoing = message(passes)
        sent.clear()
        sent.update(done.seq_id for done in (outgoing.passes if outgoing else ()))
        return outgoing

    engine.scheduler.make_spec_decoding_stats, ledger.message = count, send
    with engine.traced() as trace:
        names = [
            engine.add(prompt, OUTPUT, settings=extra) for prompt, extra in zip(prompts, wanted, strict=True)
        ]
        engine.run()
    del engine.scheduler.make_spec_decoding_stats, ledger.message
    answers = [engine.answer(name) for name in names]
    passes = [passes_of(trace, name) for name in names]
    return Served(answers, passes, *counts, [rejected[name] for name in names])


def serve(model: Path, speculative: dict[str, Any] | None = None, asynchronous: bool = False) -> Engine:
    more = {} if speculative is None else {"speculative_config": speculative}
    compression = {"policy": "shares(knorm)", **SETTINGS}
    return Engine(model, compression=compression, dtype="float32", asynchronous=asynchronous, **more)


def check_equal(ours: Served, plain: Served) -> None:
    for answer, other, passes, others in zip(
        ours.answers, plain.answers, ours.passes, plain.passes, strict=True
    ):
        assert [kept.num_computed for kept in passes] == [kept.num_computed for kept in others]
        for kept, same in zip(passes, others, strict=True):
            assert torch.equal(kept.positions, same.positions)
        assert answer.tokens == other.tokens
        torch.testing.assert_close(answer.logprobs, other.logprobs, rtol=0, atol=1e-3)


def preempted(engine: Engine) -> tuple[tuple[int, list[Kept], list[Kept]], Answer]:
    """The first request, preempted after some passes. Returns: (output tokens before, passes before,
    passes afterwards), and its answer."""
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
def heads(tmp_path_factory: pytest.TempPathFactory) -> Heads:
    return make_heads(tmp_path_factory.mktemp("heads"))


@pytest.fixture(scope="module")
def plain() -> Callable[[Path], list[Served]]:
    """Serves the requests without drafts: once, and once more over the prefix cache."""

    @cache
    def served(model: Path) -> list[Served]:
        engine = serve(model)
        runs = [run(engine, PROMPTS, WANTED) for _ in range(2)]
        engine.close()
        return runs

    return served


@dataclass(frozen=True, slots=True)
class Drafted:
    """Two runs of the requests with drafts, the same without, and a request that is preempted."""

    way: str
    target: Path
    runs: list[Served]
    plain: list[Served]
    preempted: Any


@pytest.fixture(scope="module", params=WAYS)
def drafted(
    request: pytest.FixtureRequest, tiny_model: Path, heads: Heads, plain: Callable[[Path], list[Served]]
) -> Drafted:
    """The draft model is the target itself, or one whose heads have another shape and guess nothing right."""
    way = request.param
    target = heads.target if way in HEADS else tiny_model
    without = plain(target)
    model = {
        "itself": tiny_model,
        "small": make_tiny_model(tiny_model.with_name("small"), layers=1, kv_heads=1, head_dim=32, hidden=64),
        "eagle": heads.eagle,
        "eagle3": heads.eagle3,
        "mtp": heads.mtp,
    }
    drafter = {"method": way if way in HEADS else "draft_model", "num_speculative_tokens": 3}
    speculative = NGRAM if way == "ngram" else drafter | {"model": str(model[way])}
    engine = serve(heads.mtp if way == "mtp" else target, speculative, way in ASYNCHRONOUS)
    assert engine.core.batch_queue_size == 1 + (way in ASYNCHRONOUS)
    runs = [run(engine, PROMPTS, WANTED) for _ in range(2)]
    found = Drafted(way, target, runs, without, preempted(engine))
    assert engine.is_empty()
    engine.close()
    return found


def test_passes_and_answers_are_those_without_drafts(drafted: Drafted) -> None:
    ours, theirs = drafted.runs[0], drafted.plain[0]
    assert all(len(passes) >= 3 for passes in theirs.passes[:3])
    assert ours.accepted < ours.verified, "drafts are rejected"
    assert drafted.way == "small" or ours.accepted > 0, "and accepted"
    assert theirs.verified == 0
    check_equal(ours, theirs)


def test_over_a_prefix_hit(drafted: Drafted) -> None:
    assert any(answer.cached_tokens for answer in drafted.runs[1].answers)
    check_equal(drafted.runs[1], drafted.plain[1])


def test_after_preemption(drafted: Drafted) -> None:
    """Passes fall elsewhere then; log-probabilities are those over the tokens kept, before and after."""
    (before, passes, again), answer = drafted.preempted
    assert len(again) >= 2
    wanted = [
        logprobs_with_drops(drafted.target, PROMPTS[0], answer.tokens, kept) for kept in (passes, again)
    ]
    wanted = torch.cat([wanted[0][:before], wanted[1][before:]])
    torch.testing.assert_close(answer.logprobs, wanted, rtol=0, atol=1e-2)


@pytest.mark.parametrize("drafted", [way for way in WAYS if way == "itself"], indirect=True)
def test_a_drafter_that_is_the_target_says_what_the_target_says(drafted: Drafted) -> None:
    """The drafter's layers hold the same tokens in the same slots under a policy that both can follow."""
    for served in drafted.runs:
        unequal, *others = served.steady
        assert others == [0, 0, 0]
        assert unequal > 0, "the drafter keeps other tokens where heads are unequal, so this can fail"


@pytest.mark.parametrize("drafted", [way for way in WAYS if way in ("eagle", "mtp")], indirect=True)
def test_a_drafter_that_sees_what_the_target_sees_drafts_mostly_right(drafted: Drafted) -> None:
    """The same holds for these drafters with equal heads."""
    for served in drafted.runs:
        unequal, *others = served.steady
        assert max(others) < OUTPUT / 2 < unequal
