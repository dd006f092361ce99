"""A turn of a compressed conversation goes on from what the one before has kept, as one request would that
runs through both."""

from __future__ import annotations

from dataclasses import replace

import pytest
import tiny
from disks import GIB, tiers
from settings import assert_idle, with_options
from shadow import Shadow

from kvreclaim import CompressionConfig, SamplingParams
from kvreclaim.errors import InvalidArgumentError

POLICIES = (
    "knorm",
    "query_mixture",
    "snapkv(window=3)",
    "h2o",
    "kvzap",
    "shares(kvzap)",
    "shares(streaming_llm, by=static)",
    "paged_eviction",
    "streaming_llm(positions=cache)",
)
PROMPT, NEW, LAST = tiny.prompts((150, 90, 60), seed=13)
CHUNK, FIRST = 24, 21
ENGINE = {"max_num_batched_tokens": CHUNK, "spread_compression": False}
ON = {**ENGINE, "conversation_snapshots": True}


def config(policy="knorm", **fields):
    return CompressionConfig(policy, **{"budget": 48, "interval": 16, "sinks": 2, "recent": 4, **fields})


def params(num_tokens, **more):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, **more)


def with_probs(tokens, reports):
    return list(tokens), [reports[i][token].logprob for i, token in enumerate(tokens)]


def ask(llm, prompt, num_tokens=FIRST, compression=None, **options):
    """The answer, and the request's figures."""
    given = with_options([prompt], **options)
    (output,) = llm.generate(given, params(num_tokens), config() if compression is None else compression)
    assert output.error is None
    llm.engine.memory.check()
    return output.outputs[0], output.metrics


def idle(llm):
    llm.engine.reset_prefix_cache()
    llm.engine.step()
    assert not llm.engine.snapshots.held
    assert_idle(llm)


def goes_on(llm, prompts, lengths, compression):
    """One request that draws so many tokens, is given more, draws on, ...: its answers."""
    engine, answers = llm.engine, []
    request = engine.add_request("one", prompts[0], params(400), llm.compressor(compression))
    [seq] = request.sequences
    for turn, (new, length) in enumerate(zip(prompts, lengths, strict=True)):
        if turn:
            seq.token_ids.extend(new)
            seq.num_prompt = len(seq.token_ids)
            seq.account = seq.account.fork_as_prompt(uneven=seq.footprint.eviction_method.uneven)
            if (cells := seq.state.cells) is not None:
                seq.state.cells = replace(cells, prompt_slots=cells.counts * seq.footprint.block_size)
        while seq.num_generated < length:
            engine.step()
        assert request.error is None
        drawn = seq.token_ids[seq.num_prompt :]
        answers.append(with_probs(drawn, seq.logprobs[-length:]))
    engine.abort("one")
    return answers


@pytest.mark.parametrize("protect_prompt", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_as_one_request_that_runs_through_all_turns(policy, protect_prompt, make_llm):
    compression, lengths = config(policy, protect_prompt=protect_prompt), (FIRST, 10, 30)
    alone = make_llm(**ENGINE, enable_prefix_caching=False, prefix_snapshot_fraction=0.0)
    expected = goes_on(alone, (PROMPT, NEW, LAST), lengths, compression)
    llm, text = make_llm(**ON), []
    for turn, (new, length) in enumerate(zip((PROMPT, NEW, LAST), lengths, strict=True)):
        before = len(text)
        text += new
        answer, metrics = ask(llm, text, length, compression)
        assert answer.token_ids == expected[turn][0]
        assert with_probs(answer.token_ids, answer.logprobs)[1] == pytest.approx(expected[turn][1], abs=1e-4)
        assert metrics.num_snapshot_tokens == metrics.num_cached_tokens == max(0, before - 1)
        text += answer.token_ids
    idle(llm)


def conversation(llm, compression=None, **options):
    """A first turn, and the prompt of the second."""
    answer, metrics = ask(llm, PROMPT, FIRST, compression, **options)
    assert metrics.num_snapshot_tokens == 0
    return PROMPT + answer.token_ids + NEW


KEPT = len(PROMPT) + FIRST - 1


def test_who_does_not_go_on(make_llm):
    """Other requests, and those that opt out, compute what is not exact; no later turn hits their blocks."""
    llm = make_llm(**ON)
    text = conversation(llm)
    others = (
        (text, config(budget=64), {}),
        (text, config("keydiff"), {}),
        (text, config(sinks=4), {}),
        (text, CompressionConfig("full"), {}),
        (text, config("snapkv(window=3, when=prefill)"), {}),
        (text, config(verify=True), {}),
        (text, config(), {"cache_salt": "a"}),
        (text, config(), {"conversation_snapshots": False}),
        ([text[0] ^ 1, *text[1:]], config(), {}),
        (text[:KEPT], config(), {}),
    )
    for prompt, compression, options in others:
        _, metrics = ask(llm, prompt, 2, compression, **options)
        assert metrics.num_snapshot_tokens == 0
    assert llm.score([text], [NEW], config())[0].metrics.num_snapshot_tokens == 0
    assert ask(llm, text, 2)[1].num_snapshot_tokens == KEPT
    with pytest.raises(InvalidArgumentError, match="conversation_snapshots is 'no'"):
        ask(llm, text, conversation_snapshots="no")
    idle(llm)


@pytest.mark.parametrize("options", [ENGINE, {**ON, "prefix_snapshot_fraction": 0.0}])
def test_off(options, make_llm):
    llm = make_llm(**options)
    text = conversation(llm)
    assert ask(llm, text)[1].num_snapshot_tokens == 0
    assert len(llm.engine.scheduler.snapshots) == 0
    assert_idle(llm)


def test_one_request_may_ask_for_it(make_llm):
    llm = make_llm(**ENGINE)
    text = conversation(llm, conversation_snapshots=True)
    assert ask(llm, text, conversation_snapshots=True)[1].num_snapshot_tokens == KEPT


def test_exact_blocks_that_reach_as_far_are_used(make_llm):
    """The second turn's prompt has been computed whole, without compression."""
    llm = make_llm(**ON, kv_cache_dtype="fp32")
    budget = config(budget=100, interval=80)
    answer, _ = ask(llm, PROMPT, FIRST, budget)
    text = PROMPT + answer.token_ids
    assert len(llm.engine.scheduler.snapshots) == 0, "nothing was evicted: exact blocks serve"
    _, metrics = ask(llm, text + NEW, FIRST, budget)
    assert metrics.num_snapshot_tokens == 0
    assert metrics.num_cached_tokens > len(PROMPT)


def test_scored_turns(make_llm):
    """Given answers, with the option: log-probabilities are those of generating them."""
    llm, other = make_llm(**ON), make_llm(**ENGINE)
    text = []
    for new in (PROMPT, NEW, LAST):
        before, text = len(text), text + new
        answer, _ = ask(llm, text)
        (scored,) = other.score(
            with_options([text], conversation_snapshots=True), [answer.token_ids], config()
        )
        assert before - 1 <= scored.metrics.num_snapshot_tokens <= before
        assert scored.logprobs == pytest.approx(with_probs(answer.token_ids, answer.logprobs)[1], abs=1e-4)
        text = text + answer.token_ids


def test_every_output_is_kept(make_llm):
    llm = make_llm(**ON)
    drawn = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=FIRST, ignore_eos=True)
    (output,) = llm.generate([PROMPT], drawn, config())
    assert len({tuple(one.token_ids) for one in output.outputs}) == 3
    for one in output.outputs:
        assert ask(llm, PROMPT + one.token_ids + NEW, 2)[1].num_snapshot_tokens == KEPT
    idle(llm)


def test_after_an_abort(make_llm):
    """Abort in the middle of an answer, and of a prompt."""
    llm = make_llm(**ON)
    for num_steps in (16, 6):
        request = llm.engine.add_request("r", PROMPT, params(60), llm.compressor(config()))
        for _ in range(num_steps):
            llm.engine.step()
        [seq] = request.sequences
        known = list(seq.token_ids)
        there = seq.num_computed
        llm.engine.abort("r")
        assert ask(llm, known + NEW, 2)[1].num_snapshot_tokens == there
        idle(llm)


def test_what_the_next_turn_has_is_the_first_to_go(make_llm):
    """Two conversations in room for two snapshots: both go on, turn after turn."""
    llm = make_llm(**ON, prefix_snapshot_fraction=8 / 200)  # each of 4 blocks
    texts = [PROMPT, [PROMPT[0] ^ 1, *PROMPT[1:]]]
    for turn in range(4):
        for number, text in enumerate(texts):
            answer, metrics = ask(llm, text, 4)
            assert (metrics.num_snapshot_tokens > 0) == (turn > 0)
            texts[number] = text + answer.token_ids + NEW
            assert llm.engine.scheduler.snapshots.num_blocks <= 8
    idle(llm)


def test_a_document_stays_for_the_next_question(make_llm):
    """In room for two snapshots it is used again and again, and what the questions left gives way."""
    llm = make_llm(**ON, prefix_snapshot_fraction=8 / 200)
    found = [
        ask(llm, PROMPT + question, 4, compress_prompt_at=len(PROMPT))[1].num_snapshot_tokens
        for question in tiny.prompts((40, 50, 60, 70), seed=3)
    ]
    assert found == [0, *[len(PROMPT)] * 3]
    idle(llm)


@pytest.mark.parametrize("policy", ["knorm", "snapkv(window=3)", "shares(kvzap)"])
def test_from_the_host_and_from_disk(policy, tmp_path, make_llm):
    """The second turn is the same one, wherever the first one's remainder lies."""
    compression = config(policy)
    llm = make_llm(**ON)
    text = conversation(llm, compression)
    expected = ask(llm, text, FIRST, compression)[0].token_ids
    small = {**ON, **tiers(tmp_path, num_blocks=34), "prefix_snapshot_fraction": 0.5}
    llm = make_llm(**small)
    assert conversation(llm, compression) == text
    (big,) = tiny.prompts((500,), seed=1)
    assert llm.generate(big, params(2))[0].error is None
    [snapshot] = llm.engine.scheduler.snapshots
    assert llm.engine.scheduler.snapshots.is_parked(snapshot)
    answer, metrics = ask(llm, text, FIRST, compression)
    assert metrics.num_snapshot_tokens == metrics.num_loaded_tokens == KEPT
    assert metrics.num_disk_tokens == 0
    assert answer.token_ids == expected
    llm.close()
    llm = make_llm(**small)
    answer, metrics = ask(llm, text, FIRST, compression)
    assert metrics.num_snapshot_tokens == metrics.num_disk_tokens == KEPT
    assert answer.token_ids == expected
    third = text + answer.token_ids + LAST
    assert ask(llm, third, 2, compression)[1].num_snapshot_tokens == len(text) + FIRST - 1
    llm.close()


def test_beside_compress_prompt_at(make_llm):
    """The place moves with each turn. A turn goes on from the longest of what is there, and one that wants
    nothing of the past gets what it would get alone."""
    llm, alone = make_llm(**ON), make_llm(**ENGINE, enable_prefix_caching=False)
    first, _ = ask(llm, PROMPT, compress_prompt_at=140)
    text = PROMPT + first.token_ids + NEW
    assert ask(llm, PROMPT[:145], 2)[1].num_snapshot_tokens == 140
    second, metrics = ask(llm, text, compress_prompt_at=250)
    assert metrics.num_snapshot_tokens == KEPT
    assert ask(llm, text[:255], 2)[1].num_snapshot_tokens == 250
    assert ask(llm, text + second.token_ids + LAST, 2)[1].num_snapshot_tokens == len(text) + FIRST - 1
    options = {"compress_prompt_at": 250, "conversation_snapshots": False}
    again, metrics = ask(llm, text, **options)
    assert metrics.num_snapshot_tokens == 0
    assert again.token_ids == ask(alone, text, **options)[0].token_ids
    idle(llm)


@pytest.mark.parametrize("host", [0, 16e6 / GIB])
def test_preempted_ones(host, make_llm, monkeypatch):
    """In their second turn they lose their blocks, and compute their prompt or come back from the host: what
    they attend to is what was kept."""
    llm = make_llm(**ON, kv_offloading_size=host)
    shadow, pool, compressor = Shadow(llm, monkeypatch), llm.engine.memory.pool, config(interval=64)
    texts = [[PROMPT[0] ^ i, *PROMPT[1:]] for i in range(2)]
    for turn in range(3):
        requests = [
            llm.engine.add_request(f"{i}", text, params(60), llm.compressor(compressor))
            for i, text in enumerate(texts)
        ]
        while not all(seq.num_generated > 2 for request in requests for seq in request.sequences):
            llm.engine.step()
        assert all((request.metrics.num_snapshot_tokens > 0) == (turn > 0) for request in requests)
        taken = []
        if turn == 1:
            llm.engine.scheduler.snapshots.clear()
            taken = pool.allocate(pool.num_free)
        while llm.engine.has_unfinished:
            llm.engine.step()
            if llm.engine.totals.num_preemptions:
                pool.release(taken)
                taken = []
        texts = [request.sequences[0].token_ids + NEW for request in requests]
    assert llm.engine.totals.num_preemptions
    assert (llm.engine.totals.swaps > 0) == (host > 0)
    assert shadow.worst <= 1e-5
    assert not shadow.wrong
    idle(llm)


def test_no_turn_goes_on_from_what_may_be_wrong(make_llm, monkeypatch):
    """A turn meets NaN: what it began with is forgotten."""
    llm = make_llm(**ON)
    text = conversation(llm)
    forward = llm.engine.runner.forward

    def nan(*args, **kwargs):
        logits, wanted = forward(*args, **kwargs)
        return logits * float("nan"), wanted

    monkeypatch.setattr(llm.engine.runner, "forward", nan)
    (output,) = llm.generate([text], params(2), config())
    assert "not finite" in output.error
    monkeypatch.undo()
    assert ask(llm, text, 2)[1].num_snapshot_tokens == 0
    idle(llm)


def test_scarce_signals_are_left_to_those_that_run(make_llm):
    llm = make_llm(**ON, max_signal_bytes=60_000)
    for seed in range(6):
        (prompt,) = tiny.prompts((150,), seed=100 + seed)
        assert ask(llm, prompt, 4, config("snapkv(window=3)"))[1].compactions
    room = llm.engine.signals.room
    assert 0 < room.used <= room.limit
    idle(llm)


@pytest.mark.parametrize("policy", ["knorm", "snapkv(window=3)", "shares(kvzap)"])
def test_an_answer_that_is_rewritten(policy, make_llm, monkeypatch):
    """The next turn begins with what is left of all but the last tokens of the prompt, and the answers before
    are those of a request that keeps nothing."""
    compression = config(policy)
    expected = ask(make_llm(**ENGINE), PROMPT, FIRST, compression)[0].token_ids
    llm = make_llm(**ON)
    shadow, found = Shadow(llm, monkeypatch), []
    for number, text in enumerate((PROMPT, [*PROMPT[:140], *NEW], [*PROMPT[:140], *NEW[:80], *LAST])):
        name = f"{number}"
        options = {"is_rewritten": True, "conversation_snapshots": True}
        request = llm.engine.add_request(name, text, params(FIRST), llm.compressor(compression), **options)
        while not request.finished:
            llm.engine.step()
        found.append(request.metrics.num_snapshot_tokens)
        if number == 0:
            assert request.sequences[0].token_ids[len(text) :] == expected
            assert len(llm.engine.scheduler.snapshots) == 2
    assert found == [0, len(PROMPT) - 16, 140 + len(NEW) - 16]
    assert shadow.worst <= 1e-5
    assert not shadow.wrong
    idle(llm)
