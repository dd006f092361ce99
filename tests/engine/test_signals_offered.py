"""Signals that not every request or model can give, and the errors of policies that need them."""

from __future__ import annotations

import logging

import pytest
import tiny
import torch
from recording import NEEDS, Recorder, register
from replaying import use_graphs
from settings import assert_idle, small

from kvreclaim import SamplingParams
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model.projection import output_projections

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)


@pytest.fixture(autouse=True)
def recorder(monkeypatch) -> type[Recorder]:
    return register(monkeypatch)


def config(want: str, policy: str = "recorder", **options):
    return small(policy, options={"want": want, **options})


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "deepseek-v3"])
def test_future_queries_attend_as_the_rows_to_come(family, make_llm, calibrated_dir):
    """At the first pass the view holds every key so far: a row to come, cut there and made to sum to one
    again, is what the future query makes of these keys."""
    llm = make_llm(family, max_num_batched_tokens=32)
    prompt, trace = tiny.prompts((50, 40), seed=6)
    (out,) = llm.score([prompt], [trace], config("future"))
    assert out.error is None
    assert out.metrics.compactions >= 4
    document = torch.tensor([prompt + trace])
    with torch.inference_mode():
        attentions = tiny.load_oracle(calibrated_dir(family))(document, output_attentions=True).attentions
    layers = len(attentions)
    first = Recorder.seen[0].logical_len
    for seen in Recorder.seen:
        assert seen.signals.future_queries.shape[1] == 89 - seen.logical_len
    for seen in Recorder.seen[:layers]:
        facts = llm.loaded.facts.layers[seen.layer]
        keys = seen.keys.repeat_interleave(facts.group_size, 0)
        scores = seen.signals.future_queries @ keys.transpose(1, 2) * facts.softmax.scale
        want = attentions[seen.layer][0, :, first:89, :first]
        torch.testing.assert_close(scores.softmax(-1), want / want.sum(-1, True), atol=1e-3, rtol=1e-2)
    last = Recorder.seen[-1]
    earlier = Recorder.seen[layers - 1]
    skipped = last.logical_len - earlier.logical_len
    assert torch.equal(last.signals.future_queries, earlier.signals.future_queries[:, skipped:])
    assert llm.engine.signals.passes.kept == {}


def test_the_future_is_refused_where_it_is_not_known(make_llm):
    llm = make_llm()
    with pytest.raises(InvalidArgumentError, match=r"needs the whole text.*LLM\.score"):
        llm.generate(tiny.prompts((30,)), GREEDY, config("future"))
    assert_idle(llm)


def test_the_output_projection_is_the_models_own(make_llm):
    llm = make_llm("gemma2", disable_hybrid_kv_cache_manager=True)
    llm.generate(tiny.prompts((50,)), GREEDY, config("projection"))
    want = output_projections(llm.loaded.model, llm.loaded.facts)
    assert {seen.layer for seen in Recorder.seen} == {0, 1}
    assert all(seen.signals.output_projection.equal(want[seen.layer]) for seen in Recorder.seen)


def test_a_model_without_a_known_projection_refuses_the_request(make_llm):
    llm = make_llm()
    attention = llm.loaded.model.model.layers[0].self_attn
    attention.other_name, attention.o_proj = attention.o_proj, None
    with pytest.raises(InvalidArgumentError, match="output projection of attention layer 0"):
        llm.generate(tiny.prompts((30,)), GREEDY, config("projection"))
    assert_idle(llm)


def test_a_window_of_no_queries_is_refused(make_llm):
    with pytest.raises(InvalidArgumentError, match="query_window is 0; it must be at least 1"):
        make_llm().generate(tiny.prompts((30,)), GREEDY, config("queries", window=0))


@pytest.mark.parametrize(
    ("policy", "want", "reason"),
    [
        ("uneven-recorder", "mass", "unequal numbers"),
        ("relative-recorder", "queries", "positions"),
        ("relative-recorder", "future", "positions"),
    ],
)
def test_signals_that_would_not_fit_are_refused(policy, want, reason, make_llm):
    llm = make_llm()
    with pytest.raises(InvalidArgumentError, match=reason):
        llm.score(tiny.prompts((30,)), tiny.prompts((30,)), config(want, policy))
    assert_idle(llm)


@pytest.mark.parametrize("want", [name for name in NEEDS if name not in ("future", "again")])
def test_decode_steps_are_replayed_and_hand_out_queries_where_policies_keep_some(want, make_llm):
    llm = make_llm()
    graphs, capture = use_graphs(llm)
    llm.generate(tiny.prompts((30,)), GREEDY, config(want))
    assert capture.replays == 39
    assert not graphs.refusals
    kept = want in ("queries", "mass", "observed", "all")
    assert {kind.queries for _, kind in graphs._replays} == {kept}


def test_steps_that_score_tokens_run_without_a_graph_and_the_reason_is_logged_once(make_llm, caplog):
    llm = make_llm()
    graphs, capture = use_graphs(llm)
    with caplog.at_level(logging.INFO, "kvreclaim.engine.execute.graphs"):
        (out,) = llm.generate(tiny.prompts((50,)), GREEDY, small("kvzap"))
    assert out.error is None
    assert (capture.replays, graphs.refusals.total()) == (0, 39)
    logged = [record.message for record in caplog.records if record.message.startswith("decode graphs")]
    assert logged == ["decode graphs: a step runs without a graph, because a policy keeps scores of tokens"]
