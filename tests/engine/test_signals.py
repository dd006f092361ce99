"""Signals are what attention saw: compared with transformers, and with a shadow of every pass."""

from __future__ import annotations

import pytest
import tiny
import torch
from recording import NEEDS, Recorder, register
from settings import assert_idle, small
from signal_shadow import SignalShadow

from kvreclaim import SamplingParams
from kvreclaim.compression import registry
from kvreclaim.compression.policy import Wrapper

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
KINDS = tuple(kind for kind in NEEDS if kind not in ("future", "again"))


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> type[Recorder]:
    return register(monkeypatch)


def config(want: str = "mass", policy: str = "recorder", window: int = 5, **fields):
    return small(policy, options={"want": want, "window": window}, **fields)


@torch.inference_mode()
def oracle_attentions(directory, tokens: list[int]) -> list[torch.Tensor]:
    """Transformers' own probabilities, [H, T, T] of each layer."""
    out = tiny.load_oracle(directory)(torch.tensor([tokens]), output_attentions=True)
    return [layer[0] for layer in out.attentions]


@pytest.mark.parametrize("chunk", [7, 200])
@pytest.mark.parametrize("kernels", ["native", "reference"])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_mass_is_the_column_sum_of_transformers_attention(family, kernels, chunk, make_llm, calibrated_dir):
    """At the first pass nothing has been evicted, so the model alone determines it."""
    llm = make_llm(family, kernels=kernels, max_num_batched_tokens=chunk)
    prompt = tiny.prompts((61,), seed=2)[0]
    llm.generate(prompt, SamplingParams(temperature=0.0, max_tokens=2), config("mass", budget=30, interval=8))
    attentions = oracle_attentions(calibrated_dir(family), prompt)
    attentions = [attentions[layer] for layer in llm.engine.groups.facts.ids]
    for seen in Recorder.seen[: len(attentions)]:
        computed = seen.logical_len
        heads = seen.keys.shape[0]
        rows = attentions[seen.layer][:, :computed, :computed].unflatten(0, (heads, -1))
        torch.testing.assert_close(seen.signals.mass, rows.sum((1, 2)), atol=2e-4, rtol=1e-4)
        if family != "gpt-oss":  # its sinks take a part
            whole = torch.full((heads,), float(computed * rows.shape[1]))
            torch.testing.assert_close(seen.signals.mass.sum(-1), whole, rtol=1e-5, atol=0)
    assert len(Recorder.seen) >= len(attentions)


@pytest.mark.parametrize("window", [1, 5, 100])
@pytest.mark.parametrize("chunk", [7, 200])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "glm4", "deepseek-v3"])
def test_recent_queries_attend_as_transformers_rows_do(family, chunk, window, make_llm, calibrated_dir):
    llm = make_llm(family, max_num_batched_tokens=chunk)
    prompt = tiny.prompts((61,), seed=2)[0]
    params = SamplingParams(temperature=0.0, max_tokens=2)
    llm.generate(prompt, params, config("queries", window=window, budget=30, interval=8))
    attentions = oracle_attentions(calibrated_dir(family), prompt)
    for seen in Recorder.seen[: len(attentions)]:
        computed, shape = seen.logical_len, llm.loaded.facts.layers[seen.layer]
        queries = seen.signals.queries
        assert queries.shape == (shape.num_heads, min(window, computed), shape.head_dim)
        keys = seen.keys.repeat_interleave(shape.group_size, 0)
        scores = queries @ keys.transpose(1, 2) * shape.softmax.scale
        rows = torch.arange(computed - queries.shape[1], computed)
        scores = scores.masked_fill(torch.arange(computed) > rows[:, None], -torch.inf)
        want = attentions[seen.layer][:, rows, :computed]
        torch.testing.assert_close(scores.softmax(-1), want, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_signals_follow_their_slots_through_every_pass(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, max_num_batched_tokens=32)
    shadow = SignalShadow(llm, monkeypatch)
    compression = config("observed" if family in tiny.LATENT else "all")
    outputs = llm.generate(tiny.prompts((70, 9, 33), seed=3), GREEDY, compression)
    assert [out.error for out in outputs] == [None] * 3
    assert all(out.metrics.compactions >= 2 for out in outputs)
    num_passes = sum(out.metrics.compactions for out in outputs)
    assert shadow.num_checked == llm.engine.groups.facts.num_layers * num_passes
    assert shadow.worst <= 1e-5
    assert shadow.worst_mass <= 1e-5


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_signals_follow_whole_blocks(family, make_llm, monkeypatch):
    llm = make_llm(family, enable_prefix_caching=False, block_size=8, max_num_batched_tokens=32)
    shadow = SignalShadow(llm, monkeypatch)
    compression = config("all", "block-recorder", budget=32, recent=6)
    outputs = llm.generate(tiny.prompts((70, 9, 33), seed=3), GREEDY, compression)
    assert [out.error for out in outputs] == [None] * 3
    assert all(out.metrics.compactions >= 1 for out in outputs)
    assert shadow.num_checked >= sum(out.metrics.compactions for out in outputs)
    assert shadow.worst <= 1e-5
    assert shadow.worst_mass <= 1e-5


def test_queries_of_heads_that_keep_unequal_numbers(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, max_num_batched_tokens=64)
    shadow = SignalShadow(llm, monkeypatch)
    compression = config("queries", "uneven-recorder", budget=64, interval=16)
    outputs = llm.generate(tiny.prompts((100, 40), seed=3), GREEDY, compression)
    assert [out.error for out in outputs] == [None] * 2
    assert shadow.num_checked >= 2 * sum(out.metrics.compactions for out in outputs) > 4
    assert shadow.worst <= 1e-5


def test_forks_and_preempted_sequences_carry_theirs(make_llm, monkeypatch):
    llm = make_llm(enable_prefix_caching=False, block_size=8, num_blocks=20, max_num_batched_tokens=32)
    shadow = SignalShadow(llm, monkeypatch)
    params = SamplingParams(temperature=1.0, n=3, max_tokens=60, seed=1, ignore_eos=True)
    outputs = llm.generate(tiny.prompts((30, 40), seed=3), params, config("all"))
    assert [out.error for out in outputs] == [None] * 2
    assert sum(out.metrics.preemptions for out in outputs) > 0
    assert shadow.num_checked > 2 * 6
    assert shadow.worst <= 1e-5
    assert shadow.worst_mass <= 1e-5


def test_policies_of_all_kinds_in_one_batch(make_llm, monkeypatch):
    """Each sequence is given the signals of its policy, whichever others are in the step."""
    llm = make_llm(enable_prefix_caching=False, max_num_batched_tokens=48)
    shadow = SignalShadow(llm, monkeypatch)
    configs = [
        config("mass"),
        None,
        config("queries", window=3),
        config("all", window=7),
        small("knorm"),
        config("positions"),
    ]
    outputs = llm.generate(tiny.prompts((50, 41, 33, 20, 61, 12), seed=4), GREEDY, configs)
    assert [out.error for out in outputs] == [None] * 6
    assert shadow.worst <= 1e-5
    assert shadow.worst_mass <= 1e-5
    assert {tuple(x is not None for x in fields(seen)) for seen in Recorder.seen} == {
        (False, True, False),
        (True, False, False),
        (True, True, True),
        (False, False, True),
    }
    assert {seen.signals.queries.shape[1] for seen in Recorder.seen if fields(seen)[0] is not None} == {3, 7}


def fields(seen):
    return seen.signals.queries, seen.signals.mass, seen.signals.positions


def test_nothing_is_kept_for_who_does_not_ask(make_llm, monkeypatch):
    llm = make_llm()
    signals, observed = llm.engine.signals, []
    observe = signals.observe
    monkeypatch.setattr(signals, "observe", lambda *args: observed.append(observe(*args)) or observed[-1])
    llm.generate(tiny.prompts((50, 41), seed=4), GREEDY, [small("knorm"), None])
    llm.generate(tiny.prompts((50,), seed=5), GREEDY, config("positions"))
    llm.generate(tiny.prompts((50,), seed=5), GREEDY, config("projection"))
    assert observed == []
    llm.generate(tiny.prompts((50,), seed=5), GREEDY, config("mass"))
    assert len(observed) == 40
    assert not any(write is None for write in observed)


def test_what_was_kept_goes_with_its_sequences(make_llm):
    llm = make_llm(block_size=8)
    signals = llm.engine.signals
    params = SamplingParams(temperature=1.0, n=2, max_tokens=60, seed=1, ignore_eos=True)
    request = llm.add_prompt(tiny.prompts((40,))[0], params, config("all"))
    for _ in range(9):
        llm.engine.step()
    assert len(request.sequences) == 2
    mass, queries = signals._mass.tensor, signals._queries[5].tensor
    assert mass.shape[:3] == (2, 2, 2)
    assert queries.shape == (2, 2, 5, 4, 16)
    llm.abort(request.request_id)
    assert signals._mass.tensor.numel() == signals._queries[5].tensor.numel() == 0
    llm.generate(tiny.prompts((40, 50, 20)), GREEDY, config("all"))
    assert signals._mass.tensor.numel() == signals._queries[5].tensor.numel() == 0
    assert_idle(llm)


def test_a_wrapper_asks_for_what_its_policy_needs(make_llm, monkeypatch):
    class Plain(Wrapper):
        name = "plain-wrapper"

    monkeypatch.setattr(registry, "_BUILT_IN", {**registry._BUILT_IN, Plain.name: Plain})
    make_llm().generate(tiny.prompts((50,)), GREEDY, config("all", "plain-wrapper(recorder)"))
    assert Recorder.seen
    assert all(x is not None for seen in Recorder.seen for x in fields(seen))
