"""Spans of a prompt that the caller drops: later tokens do not see them, and nothing is computed again."""

from __future__ import annotations

import pytest
import tiny
import torch
from settings import assert_idle, with_options
from shadow import Shadow

from kvreclaim import LLM, CompressionConfig, SamplingParams
from kvreclaim.engine.features.drops.feature import SpanDrops
from kvreclaim.errors import InvalidArgumentError

SIZE = 16
FEW = ("qwen3-next", "lfm2")
PROMPT, NEW, LAST = tiny.prompts((150, 40, 37), seed=21)
SPAN = (35, 100)
GONE = range(48, 96)
"""The whole blocks within it."""
FIRST = 12
ON = {"max_num_batched_tokens": 64, "conversation_snapshots": True}


def params(num_tokens=FIRST, **more):
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, **more)


def ask(llm, prompt, num_tokens=FIRST, compression=None, **options):
    """The answer, and the request's figures."""
    (output,) = llm.generate(with_options([prompt], **options), params(num_tokens), compression)
    assert output.error is None
    llm.engine.memory.check()
    return output.outputs[0], output.metrics


def logits(model, tokens, drops):
    """transformers' own, where tokens from `at` on do not see `gone`, for each (gone, at)."""
    seen = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
    for gone, at in drops:
        seen[at:, list(gone)] = False
    mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    return model(torch.tensor([tokens]), attention_mask=mask[None, None]).logits[0]


def scored(model, tokens, drops, num_last):
    """The log-probabilities of the last tokens."""
    rows = logits(model, tokens, drops)[-num_last - 1 : -1].log_softmax(-1)
    return rows[range(num_last), tokens[-num_last:]].tolist()


def masked(model, prompt, drops, num_tokens):
    """Tokens that transformers draws, and their log-probabilities."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(logits(model, tokens, drops)[-1].argmax()))
    return tokens[len(prompt) :], scored(model, tokens, drops, num_tokens)


def check(answer, expected):
    tokens, logprobs = expected
    assert list(answer.token_ids) == tokens
    got = [report[token].logprob for report, token in zip(answer.logprobs, tokens, strict=True)]
    assert got == pytest.approx(logprobs, abs=1e-4)


@pytest.fixture
def oracle(calibrated_dir):
    with torch.inference_mode():
        yield tiny.load_oracle(calibrated_dir("llama"))


@pytest.mark.parametrize("at", [None, 100, 112, 130])
@pytest.mark.parametrize("chunk", [13, 64, 256])
def test_later_tokens_do_not_see_them(at, chunk, make_llm, oracle):
    llm = make_llm(max_num_batched_tokens=chunk)
    answer, metrics = ask(llm, PROMPT, drop_spans=[SPAN], drop_at=at)
    check(answer, masked(oracle, PROMPT, [(GONE, len(PROMPT) - 1 if at is None else at)], FIRST))
    assert metrics.num_dropped_tokens == metrics.tokens_evicted == len(GONE)
    assert metrics.blocks_freed == metrics.blocks_perfect == 3
    assert_idle(llm)


def test_turns(make_llm, oracle):
    """The first turn drops nothing; the second one computes its new tokens alone and drops a span of the
    first; the third one begins from that, and so does the fourth, which drops another span."""
    llm = make_llm(**ON)
    answer, _ = ask(llm, PROMPT)
    text = PROMPT + list(answer.token_ids)
    second = text + NEW
    drops = [(GONE, len(text))]
    answer, metrics = ask(llm, second, drop_spans=[SPAN], drop_at=len(text))
    check(answer, masked(oracle, second, drops, FIRST))
    assert metrics.num_cached_tokens == len(text) // SIZE * SIZE
    assert metrics.num_snapshot_tokens == 0
    text = second + list(answer.token_ids)
    third = text + LAST
    answer, metrics = ask(llm, third, drop_spans=[SPAN], drop_at=len(text))
    check(answer, masked(oracle, third, drops, FIRST))
    assert metrics.num_cached_tokens == metrics.num_snapshot_tokens == len(text) - 1
    assert metrics.num_dropped_tokens == len(GONE)
    assert metrics.peak_blocks == -(-(len(third) + FIRST - 1 - len(GONE)) // SIZE)
    text = third + list(answer.token_ids)
    fourth, more = text + NEW, (100, 148)  # beside the first span, so that a block between goes, too
    drops += [(range(96, 144), len(text))]
    answer, metrics = ask(llm, fourth, drop_spans=[more, SPAN], drop_at=len(text))
    check(answer, masked(oracle, fourth, drops, FIRST))
    assert metrics.num_snapshot_tokens == len(text) - 1
    assert metrics.num_dropped_tokens == len(GONE) + 48
    llm.engine.reset_prefix_cache()
    llm.engine.step()
    assert_idle(llm)


def test_spans_within_a_block(make_llm, oracle):
    """Nothing goes, but what follows is in no index: the next turn begins with what this one kept."""
    llm, short = make_llm(**ON), (50, 60)
    answer, metrics = ask(llm, PROMPT, drop_spans=[short], drop_at=100)
    check(answer, masked(oracle, PROMPT, [], FIRST))
    assert metrics.num_dropped_tokens == 0
    text = PROMPT + list(answer.token_ids)
    answer, metrics = ask(llm, text + NEW, drop_spans=[short, SPAN], drop_at=len(text))
    assert metrics.num_snapshot_tokens == len(text) - 1
    check(answer, masked(oracle, text + NEW, [(GONE, len(text))], FIRST))


def test_a_turn_that_cannot_be_kept_leaves_the_one_before(make_llm):
    """What it began with gives way like any other, the least recently used first."""
    llm = make_llm(**ON, num_blocks=80, prefix_snapshot_fraction=0.25)
    drops = {"drop_spans": [SPAN], "drop_at": 101}
    ask(llm, NEW + PROMPT[len(NEW) :], **drops)
    answer, _ = ask(llm, PROMPT, **drops)
    snapshots, text = llm.engine.scheduler.snapshots, PROMPT + list(answer.token_ids)
    first, second = snapshots
    _, metrics = ask(llm, text + PROMPT + PROMPT, **drops)
    assert metrics.num_snapshot_tokens == len(text) - 1
    assert list(snapshots) == [first, second], "the longer one takes more than a quarter of the pool"
    assert snapshots.evict_one()
    assert list(snapshots) == [second]


def test_namespaces(make_llm, oracle):
    """A request that drops nothing, or less, or other spans, hits no cache that lacks them."""
    llm = make_llm(**ON)
    answer, _ = ask(llm, PROMPT, drop_spans=[SPAN], drop_at=120)
    text = PROMPT + list(answer.token_ids) + NEW
    exact = 112  # before drop_at all is as without drops
    for options in (
        {},
        {"drop_spans": [(35, 99)]},
        {"drop_spans": [(64, 120)], "drop_at": 170},
        {"drop_spans": [SPAN], "cache_salt": "a"},
        {"drop_spans": [SPAN], "conversation_snapshots": False},
    ):
        metrics = ask(llm, text, 1, **options)[1]
        assert metrics.num_snapshot_tokens == 0
        llm.engine.reset_prefix_cache()
        ask(llm, PROMPT, drop_spans=[SPAN], drop_at=120)
        assert metrics.num_cached_tokens in (0, exact)
    check(ask(llm, text)[0], masked(oracle, text, [], FIRST))
    metrics = ask(llm, text, 1, drop_spans=[SPAN], drop_at=170)[1]
    assert metrics.num_snapshot_tokens == len(PROMPT) + FIRST - 1


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(mode, make_llm, oracle):
    host = {"kv_offloading_size": 0.01} if mode == "swap" else {}
    llm = make_llm(num_blocks=18, preemption_mode=mode, max_num_batched_tokens=64, **host)
    prompts = [PROMPT, [*NEW, *PROMPT[40:]]]
    given = with_options(prompts, drop_spans=[SPAN], drop_at=110)
    outputs = llm.generate(given, params(60))
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(output.outputs[0], masked(oracle, prompt, [(GONE, 110)], 60))
        assert output.metrics.num_dropped_tokens == len(GONE)


def test_several_outputs_share_what_is_left(make_llm, oracle):
    llm = make_llm()
    given = with_options([PROMPT], drop_spans=[SPAN])
    (output,) = llm.generate(given, SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=8, logprobs=0))
    assert output.metrics.num_dropped_tokens == len(GONE)
    for one in output.outputs:
        text = PROMPT + list(one.token_ids)
        expected = scored(oracle, text, [(GONE, len(PROMPT) - 1)], len(one.token_ids))
        got = [report[token].logprob for report, token in zip(one.logprobs, one.token_ids, strict=True)]
        assert got == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"drop_spans": [(10, 10)]},
        {"drop_spans": [(-1, 4)]},
        {"drop_spans": [(4, 151)]},
        {"drop_spans": [(4, 20)], "drop_at": 19},
        {"drop_spans": [(4, 20)], "drop_at": 150},
        {"drop_spans": [3]},
        {"drop_spans": 3},
        {"drop_at": 30},
    ],
)
def test_refused(options, make_llm):
    with pytest.raises(InvalidArgumentError, match="drop_"):
        ask(make_llm(), PROMPT, **options)


def test_a_prompt_of_one_token_drops_nothing(make_llm):
    with pytest.raises(InvalidArgumentError, match=r"drop_spans has \(0, 1\)"):
        ask(make_llm(), PROMPT[:1], drop_spans=[(0, 1)])


POLICIES = (
    "knorm",
    "snapkv(window=3)",
    "h2o",
    "kvzap",
    "paged_eviction",
    "shares(kvzap)",
    "shares(surrogate)",
    "snapkv(window=3, when=prefill)",
)
LONG, MORE = tiny.prompts((230, 60), seed=3)


def compressed(policy):
    return CompressionConfig(policy, budget=64, interval=16, sinks=2, recent=4)


@pytest.mark.parametrize("policy", POLICIES)
def test_beside_compression(policy, make_llm, monkeypatch):
    """Attention is over what passes and drops have left; of a span passes find only what shares a block with
    other tokens."""
    llm = make_llm(max_num_batched_tokens=32, conversation_snapshots=True)
    shadow, compression = Shadow(llm, monkeypatch), compressed(policy)
    spans, text = [(20, 70), (150, 210)], []
    for turn, new in enumerate((LONG, NEW, MORE)):
        at = len(text) if text else 220
        answer, metrics = ask(llm, text + new, 8, compression, drop_spans=spans[: turn + 1], drop_at=at)
        assert metrics.compactions
        goes_on = turn == 2 and "prefill" not in policy  # of the second span passes had left some in turn 1
        assert metrics.num_snapshot_tokens == (len(text) - 1 if goes_on else 0)
        assert metrics.num_dropped_tokens >= (32, 64, 64)[turn]
        history = shadow.histories[max(shadow.histories)]
        left = [each for layer in range(2) for each in history.attended(layer)]
        for start, end in spans[: turn + 1]:
            assert all(int(((each >= start) & (each < end)).sum()) <= 4 * (SIZE - 1) for each in left)
        text = text + new + list(answer.token_ids)
    assert shadow.num_drops >= 2
    assert shadow.worst <= 1e-5
    assert not shadow.wrong


@pytest.mark.parametrize("policy", ["knorm", "shares(kvzap)", "shares(surrogate)"])
def test_what_came_since_the_last_pass(policy, make_llm, monkeypatch):
    """A compressed conversation goes on, less a span that no pass has seen."""
    llm = make_llm(max_num_batched_tokens=32, conversation_snapshots=True)
    shadow, compression = Shadow(llm, monkeypatch), compressed(policy)
    answer, _ = ask(llm, LONG, 4, compression)
    [snapshot] = llm.engine.scheduler.snapshots
    seen, text = snapshot.account.last_computed, LONG + list(answer.token_ids)
    second, span = text + MORE, (len(text), len(text) + 36)
    answer, metrics = ask(llm, second, 2, compression)
    assert seen < span[0]
    text = second + list(answer.token_ids)
    last = max(one.account.last_computed for one in llm.engine.scheduler.snapshots)
    answer, metrics = ask(llm, text + NEW, 4, compression, drop_spans=[span], drop_at=len(text))
    assert (metrics.num_snapshot_tokens == len(text) - 1) == (last <= span[0])
    assert metrics.num_dropped_tokens >= 16
    assert shadow.worst <= 1e-5
    assert not shadow.wrong


@pytest.mark.parametrize("family", ["ministral", "llama4", *FEW])
def test_layers_with_windows_or_states(family, tiny_dir, monkeypatch):
    """Blocks of a prompt that drops nothing begin one that does, with the answer of an engine that
    has nothing cached; layers with full attention no longer see the span."""
    found = []
    for is_cached in (False, True):
        llm = LLM(
            tiny_dir(family), dtype="float32", device="cpu", num_blocks=200, conversation_snapshots=True
        )
        if is_cached:
            ask(llm, PROMPT)
        shadow = None if family in FEW else Shadow(llm, monkeypatch)
        answer, metrics = ask(llm, PROMPT + NEW, drop_spans=[SPAN], drop_at=len(PROMPT))
        found.append((answer.token_ids, metrics.num_dropped_tokens, metrics.num_cached_tokens > 0))
        assert shadow is None or (shadow.num_drops == 1 and shadow.worst <= 1e-5)
        monkeypatch.undo()
        text = PROMPT + NEW + list(answer.token_ids)
        _, metrics = ask(llm, text + LAST, drop_spans=[SPAN], drop_at=len(text))
        assert metrics.num_snapshot_tokens == len(text) - 1
        llm.engine.reset_prefix_cache()
        llm.engine.step()
        assert_idle(llm)
    assert found[0][:2] == found[1][:2]
    assert found[1][1:] == (len(GONE), True)


@pytest.mark.parametrize("wrong", [{"drop_spans": 0}, {"drop_spans": False}, {"drop_at": False}])
def test_what_is_no_span_is_refused(make_llm, wrong):
    with pytest.raises(InvalidArgumentError, match=next(iter(wrong))):
        make_llm().generate([{"prompt_token_ids": [1, 2, 3], **wrong}], SamplingParams(max_tokens=1))


@pytest.mark.parametrize("policy", ["surrogate", "h2o"])
def test_signals_stay_with_their_tokens(policy, make_llm, monkeypatch):
    """Positions (surrogate) and sums of attention (h2o) of the slots that are left are those from before."""
    llm = make_llm(max_num_batched_tokens=32)
    feature, signals, size = llm.engine.feature(SpanDrops), llm.engine.signals, SIZE
    follow, dropped = feature.follow, []

    def read(seq, num_slots):
        if policy == "surrogate":
            return signals.positions(seq, num_slots).clone()
        return torch.stack([signals.mass(seq, layer, num_slots) for layer in range(2)])

    def watched(seq, done):
        before = read(seq, done.num_tokens)
        left = [slot for slot in range(done.num_tokens) if slot // size not in done.entries]
        follow(seq, done)
        assert torch.equal(read(seq, len(left)), before[..., left])
        dropped.extend(done.entries)

    monkeypatch.setattr(feature, "follow", watched)
    ask(llm, LONG, 8, compressed(policy), drop_spans=[(20, 70), (150, 210)], drop_at=220)
    assert dropped
