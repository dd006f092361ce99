"""Two stages: the inner score alone, then what a token's value does to the output."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layer_view, model_facts, noise, query_stats

from kvreclaim.compression.compressor import Compressor
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.compression.policies import critical
from kvreclaim.compression.policies.critical import Critical
from kvreclaim.compression.policies.h2o import H2O
from kvreclaim.compression.policies.knorm import Knorm
from kvreclaim.compression.policy import LayerSignals, Signal
from kvreclaim.compression.registry import make_policy
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.key_source import DenseSource

MASS = torch.tensor([[0.9, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.0]])
SIZE = torch.tensor([1.0, 1.0, 1.0, 1.0, 9.0, 1.0, 30.0, 99.0])


def one_head(first_stage=0.5, budget=4, protected=0):
    """Scores of eight tokens with ||W_o v||_1 = SIZE, the last `protected` of them not to be evicted."""
    facts = dataclasses.replace(layer_facts(), num_heads=1, num_kv_heads=1)
    view = layer_view(facts, None, num_tokens=8)
    values = torch.zeros(1, 8, 8)
    values[0, :, 0] = SIZE
    projection = torch.zeros(1, 8, 6)
    projection[0, 0, :2] = torch.tensor([0.25, -0.75])
    view = dataclasses.replace(
        view,
        source=DenseSource(view.keys, values),
        signals=LayerSignals(mass=MASS, output_projection=projection),
        candidates=slice(0, 8 - protected),
        budget=budget,
    )
    return Critical(H2O(), first_stage).rerank(view, MASS)[0]


def top(scores, count):
    return sorted(scores.topk(count).indices.tolist())


def test_half_by_score_and_half_by_what_the_output_gets():
    scores = one_head()
    assert top(scores, 2) == [0, 1]
    assert top(scores, 4) == [0, 1, 4, 6]  # .2 x 9 and .05 x 30 before .4 x 1
    torch.testing.assert_close(scores[2:], torch.tensor([0.4, 0.3, 1.8, 0.1, 1.5, 0.0]) / 1.8)


def test_the_first_stage_counts_places_that_are_not_protected():
    scores = one_head(budget=6, protected=2)
    assert (scores > 1).nonzero()[:, 0].tolist() == [0, 1]
    assert scores[6:].tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("first_stage", "expected"), [(1.0, [0, 1, 2, 3]), (0.0, [0, 1, 4, 6]), (0.25, [0, 1, 4, 6])]
)
def test_share_of_the_first_stage(first_stage, expected):
    assert top(one_head(first_stage), 4) == expected


def test_a_budget_below_the_protected_tokens_leaves_no_first_stage():
    assert (one_head(budget=1, protected=2) <= 1).all()


@pytest.mark.parametrize("step", [1 << 25, 7])
def test_norms_are_the_mean_over_the_group(step, monkeypatch):
    monkeypatch.setattr(critical, "MAX_LOGITS", step)
    view = dataclasses.replace(layer_view(layer_facts(), None), candidates=slice(0, 9), budget=0)
    outputs = torch.einsum(
        "htd,hdm->htm", view.values.repeat_interleave(2, 0), view.signals.output_projection
    )
    norms = outputs.abs().sum(-1).view(2, 2, 9).mean(1)
    product = view.signals.mass * norms
    expected = product / product.amax(dim=1, keepdim=True)
    torch.testing.assert_close(Critical(H2O()).rerank(view, view.signals.mass), expected)


def test_a_negative_inner_score_is_shifted_to_zero():
    view = dataclasses.replace(layer_view(layer_facts(), None), candidates=slice(0, 9), budget=0)
    ones = dataclasses.replace(view.signals, output_projection=torch.zeros(4, 8, 6))
    ones.output_projection[:, 0] = 1.0
    values = torch.zeros(2, 9, 8)
    values[..., 0] = 2.0
    view = dataclasses.replace(view, source=DenseSource(view.keys, values), signals=ones)
    inner = Knorm().score(view)
    shifted = inner - inner.amin(dim=1, keepdim=True)
    torch.testing.assert_close(
        Critical(Knorm()).rerank(view, inner), shifted / shifted.amax(dim=1, keepdim=True)
    )


def test_chooses_through_the_compressor():
    facts = model_facts(1)
    source = DenseSource(noise(0, 2, 12, 8), noise(1, 2, 12, 8))
    signals = LayerSignals(mass=noise(2, 2, 12).abs(), output_projection=noise(3, 4, 8, 6))
    config = CompressionConfig("critical(h2o)", budget=7, sinks=1, recent=2)
    kept = Compressor(config, facts).choose(lambda _: source, 12, 12, 12, signals=lambda _: signals)
    free = signals.mass[:, 1:10]
    outputs = torch.einsum("htd,hdm->htm", source.values.repeat_interleave(2, 0), signals.output_projection)
    worth = (signals.mass * outputs.abs().sum(-1).view(2, 2, 12).mean(1))[:, 1:10]
    for head in range(2):
        chosen = set(free[head].topk(2).indices.tolist())
        rest = [j for j in worth[head].argsort(descending=True).tolist() if j not in chosen]
        expected = {0, 10, 11} | {j + 1 for j in chosen | set(rest[:2])}
        assert set(kept[0, head].tolist()) == expected


def test_asks_for_what_the_inner_policy_needs_and_the_projection():
    policy = make_policy("critical(triattention)")
    assert policy.needs == {Signal.QUERY_STATS, Signal.OUTPUT_PROJECTION}
    assert policy.default_mode == policy.inner.default_mode
    facts = model_facts()
    view = layer_view(facts.layers[0], query_stats(facts).layer(0))
    assert policy.rerank(view, policy.score(view)).isfinite().all()


@pytest.mark.parametrize("inner", ["full", "quest", "paged_eviction"])
def test_refuses_what_it_cannot_rank(inner):
    with pytest.raises(InvalidArgumentError, match=rf"critical\({inner}\) is refused: .* such as critical"):
        make_policy(f"critical({inner})")


def test_first_stage_is_a_share():
    with pytest.raises(InvalidArgumentError, match="first_stage"):
        Critical(H2O(), first_stage=2)
