"""Which requests run first, which are preempted, and what is logged about it."""

from __future__ import annotations

import logging
import random

import pytest
import tiny
from settings import assert_idle

from kvreclaim import SamplingParams
from kvreclaim.errors import InvalidArgumentError


def greedy(max_tokens=12):
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)


def add(engine, name, priority=0, length=20, max_tokens=12, seed=0):
    prompt = tiny.prompts((length,), seed=seed)[0]
    return engine.add_request(name, prompt, greedy(max_tokens), priority=priority)


def finish(engine, requests):
    """Run to the end. Returns: the names in the order in which they ended."""
    order = []
    while engine.has_unfinished:
        order += [r.request_id for r in engine.step().requests if r.finished]
        engine.memory.check()
    assert sorted(order) == sorted(r.request_id for r in requests)
    return order


@pytest.mark.parametrize(
    ("policy", "expected"), [("fcfs", "abcdef"), ("priority", "dfbeac"), ("cache", "dfbeac")]
)
def test_the_order_in_which_waiting_requests_run(policy, expected, make_llm):
    engine = make_llm(scheduling_policy=policy, max_num_seqs=1).engine
    given = {"a": 3, "b": 0, "c": 3, "d": -7, "e": 0, "f": -1}
    ranked = policy != "fcfs"
    requests = [add(engine, name, priority if ranked else 0) for name, priority in given.items()]
    assert "".join(finish(engine, requests)) == expected


def test_order_by_priority_and_arrival_whatever_comes(make_llm):
    """Compared with sorting, for random priorities and arrivals between steps."""
    engine, rng = make_llm(scheduling_policy="priority", max_num_seqs=1).engine, random.Random(4)
    ended, expected = [], []
    requests = [add(engine, f"r{i}", rng.randrange(-2, 3), 9, rng.randrange(1, 6)) for i in range(12)]
    while engine.has_unfinished:
        waiting = [r for r in requests if r.metrics.queue_s is None]
        running = [r for r in requests if r.metrics.queue_s is not None and not r.finished]
        engine.step()
        begun = [r for r in waiting if r.metrics.queue_s is not None]
        if not running:
            first = min(waiting, key=lambda r: (r.spec.priority, requests.index(r)))
            assert begun == [first]
            expected.append(first)
        ended += [r for r in requests if r.finished and r not in ended]
        if rng.random() < 0.3 and len(requests) < 25:
            requests.append(add(engine, f"r{len(requests)}", rng.randrange(-2, 3), length=9, max_tokens=2))
    assert ended == expected


@pytest.mark.parametrize(
    ("policy", "victims"),
    [("fcfs", ["third"]), ("priority", ["first"])],
)
def test_the_victim_is_the_last_to_come_or_the_least_important(policy, victims, make_llm, caplog):
    llm = make_llm(scheduling_policy=policy, block_size=8, num_blocks=12)
    engine, ranked = llm.engine, policy == "priority"
    alone = [
        make_llm(block_size=8).generate(tiny.prompts((20,), seed=seed), greedy(25))[0].outputs[0].token_ids
        for seed in range(3)
    ]
    requests = [
        add(engine, name, priority if ranked else 0, max_tokens=25, seed=seed)
        for seed, (name, priority) in enumerate([("first", 5), ("second", 1), ("third", 2)])
    ]
    with caplog.at_level(logging.INFO, logger="kvreclaim.schedule"):
        finish(engine, requests)
    assert [r.request_id for r in requests if r.metrics.preemptions] == victims
    assert [r.output().outputs[0].token_ids for r in requests] == alone
    assert sum(engine.totals.preemptions.values()) == sum(r.metrics.preemptions for r in requests) > 0
    lines = [record.getMessage() for record in caplog.records if "is preempted" in record.getMessage()]
    assert len(lines) == engine.totals.num_preemptions
    assert all(f"request {victims[0]} (output 0" in line for line in lines)
    assert_idle(llm)


def test_every_reason_of_a_preemption_is_logged(make_llm, caplog):
    """A prompt's next chunk, a next token, or its own: counted apart, and all are there from the start."""
    engine = make_llm(scheduling_policy="priority", block_size=8, num_blocks=14).engine
    assert engine.totals.preemptions == {"decode": 0, "prefill": 0, "itself": 0, "fairness": 0}
    rng, requests = random.Random(2), []
    with caplog.at_level(logging.INFO, logger="kvreclaim.schedule"):
        for i in range(30):
            requests.append(
                add(engine, f"r{i}", rng.randrange(3), rng.randrange(5, 60), rng.randrange(5, 40))
            )
            for _ in range(rng.randrange(8)):
                engine.step()
        finish(engine, [r for r in requests if not r.finished])
    lines = [record.getMessage() for record in caplog.records if "is preempted" in record.getMessage()]
    for reason, count in engine.totals.preemptions.items():
        assert sum(f"reason {reason}:" in line for line in lines) == count
    assert engine.totals.preemptions["decode"] > 0
    assert engine.totals.preemptions["itself"] > 0


def test_a_chunk_of_a_prompt_preempts_the_less_important(make_llm):
    """A long prompt is let in when its blocks are free, but takes them chunk by chunk."""
    llm = make_llm(scheduling_policy="priority", block_size=8, num_blocks=14, max_num_batched_tokens=8)
    engine = llm.engine
    small = [add(engine, name, priority=5, length=6, max_tokens=40) for name in ("x", "y")]
    while not all(r.metrics.ttft_s for r in small):
        engine.step()
    long = add(engine, "long", priority=0, length=88, max_tokens=2)
    finish(engine, [*small, long])
    assert engine.totals.preemptions["prefill"] > 0
    assert long.metrics.preemptions == 0
    assert_idle(llm)


def test_a_waiting_request_preempts_none_however_important(make_llm):
    llm = make_llm(scheduling_policy="priority", block_size=8, num_blocks=8)
    engine = llm.engine
    first = add(engine, "first", priority=9, length=40, max_tokens=10)
    engine.step()
    add(engine, "later", priority=9, length=30, max_tokens=2, seed=1)
    urgent = add(engine, "urgent", priority=-9, length=30, max_tokens=2, seed=2)
    engine.step()
    assert urgent.metrics.queue_s is None
    order = finish(engine, [first, urgent, engine.requests["later"]])
    assert order == ["first", "urgent", "later"]
    assert engine.totals.num_preemptions == 0


@pytest.mark.parametrize("priority", [1.5, "high", None, True])
def test_a_priority_that_is_no_integer_is_refused(priority, make_llm):
    llm = make_llm(scheduling_policy="priority")
    with pytest.raises(InvalidArgumentError, match="priority is"):
        llm.engine.add_request("r", [1, 2], greedy(), priority=priority)
    assert_idle(llm)


def test_a_priority_that_nothing_would_go_by_is_refused(make_llm):
    llm = make_llm()
    with pytest.raises(InvalidArgumentError, match="scheduling_policy is fcfs"):
        llm.engine.add_request("r", [1, 2], greedy(), priority=1)
    assert_idle(llm)
    llm.engine.add_request("r", [1, 2], greedy(), priority=0)
    llm.abort("r")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduling_policy": "lifo"}, "scheduling_policy is 'lifo'.*fcfs, priority, cache"),
        ({"eviction_policy": "mru"}, "mru.*lru"),
        ({"eviction_policy": None}, "eviction_policy is None"),
        ({"max_pinned_fraction": 1.5}, "max_pinned_fraction is 1.5"),
        ({"max_seqs": 3}, "max_seqs is no option of the engine.*max_num_seqs"),
    ],
)
def test_engine_options_are_checked_by_name_and_value(options, message, make_llm):
    with pytest.raises(InvalidArgumentError, match=message):
        make_llm(**options)


def test_priorities_of_a_batch(make_llm, monkeypatch):
    llm, requests = make_llm(scheduling_policy="priority", max_num_seqs=1), []
    add = llm.engine.add
    monkeypatch.setattr(
        llm.engine, "add", lambda *args, **more: requests.append(add(*args, **more)) or requests[-1]
    )
    llm.generate(tiny.prompts((9, 10, 11)), greedy(), priority=[2, 0, 1])
    began = [request.arrival_s + request.metrics.queue_s for request in requests]
    assert began[1] < began[2] < began[0]
    with pytest.raises(InvalidArgumentError, match="priority has 2 entries for 3 prompts"):
        llm.generate(tiny.prompts((9, 10, 11)), greedy(), priority=[2, 0])
    with pytest.raises(InvalidArgumentError, match=r"prompt 1: priority is 3, but scheduling_policy is fcfs"):
        make_llm().generate(tiny.prompts((9, 10)), greedy(), priority=[0, 3])


def test_a_prompt_that_waits_or_is_preempted_is_hashed_once(make_llm, monkeypatch):
    engine = make_llm(num_blocks=16, block_size=8, max_num_batched_tokens=64).engine
    hashing = engine.memory._hashing
    hash_once, seen = hashing._function, []
    monkeypatch.setattr(hashing, "_function", lambda message: seen.append(message) or hash_once(message))
    requests = [add(engine, f"r{i}", length=60, max_tokens=30, seed=i) for i in range(4)]
    finish(engine, requests)
    assert sum(engine.totals.preemptions.values()) > 0
    filled = sum((len(request.sequences[0].token_ids) - 1) // 8 for request in requests)
    assert len(seen) == len(requests) + filled, "a root each, and every block that was full"
