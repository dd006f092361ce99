"""From queries to statistics."""

import dataclasses

import pytest
import torch
from compression_oracles import layer_facts, layout, model_facts, noise, same_stats

from kvreclaim.compression import stats_builder
from kvreclaim.compression.stats_builder import Clustering, StatsBuilder
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.rope import to_bands

FACTS = model_facts()


def test_moments_are_those_of_the_queries():
    rope = layout(3, "interleaved", 2)
    facts = model_facts(2, rope=rope)
    queries = [noise(n, 4, 5000, 8) + n for n in range(2)]
    builder = StatsBuilder(facts, Clustering(4))
    for n in (1, 0):
        builder.add_layer(n, queries[n])
    stats = builder.build()
    stats.check_model(facts)
    for n in range(2):
        torch.testing.assert_close(stats.q_mean[n], queries[n].mean(1), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(stats.q_abs_mean[n], to_bands(queries[n], rope).abs().mean(1))
    assert (stats.metadata.num_tokens, stats.metadata.num_centers) == (5000, 4)
    torch.testing.assert_close(stats.center_weight.sum(-1), torch.ones(2, 4))


def test_variance_is_shared_by_the_dims_of_a_band():
    rope = layout(3, start=2)
    queries = noise(0, 4, 400, 8) * torch.arange(1.0, 9.0)
    builder = StatsBuilder(model_facts(1, rope=rope), Clustering(1))
    builder.add_layer(0, queries)
    variance = builder.build().center_var[0, :, 0]
    spread = queries - queries.mean(1, keepdim=True)
    real, imag = rope.band_dims()
    bands = to_bands(spread, rope).abs().square().mean(1) / 2
    torch.testing.assert_close(variance[:, real], bands)
    torch.testing.assert_close(variance[:, imag], bands)
    torch.testing.assert_close(variance[:, :2], spread.square().mean(1)[:, :2])


def test_layers_with_fewer_bands_are_padded():
    layers = (layer_facts(layout(4)), layer_facts(layout(1)))
    facts = dataclasses.replace(model_facts(2), layers=layers)
    builder = StatsBuilder(facts, Clustering(0))
    for n in range(2):
        builder.add_layer(n, noise(n, 4, 50, 8))
    stats = builder.build()
    assert (stats.q_abs_mean[1, :, 0] > 0).all()
    assert torch.equal(stats.q_abs_mean[1, :, 1:], torch.zeros(4, 3))
    layouts = [layer.rope for layer in layers]
    ratio = stats.concentration(layouts)
    assert ratio.shape == (2, 4, 4)
    assert ((ratio >= 0) & (ratio <= 1)).all()
    torch.testing.assert_close(stats.mean_concentration(layouts)[1], ratio[1, :, 0].mean())


def test_concentration_is_one_for_a_constant_query():
    builder = StatsBuilder(model_facts(1), Clustering(0))
    builder.add_layer(0, noise(0, 4, 1, 8).expand(-1, 20, -1))
    stats = builder.build()
    torch.testing.assert_close(stats.concentration([layout(4)]), torch.ones(1, 4, 4))
    assert stats.mean_concentration([None]).tolist() == [0.0]


def test_the_same_queries_give_the_same_statistics():
    def built(seed):
        builder = StatsBuilder(model_facts(1), Clustering(3, seed=seed))
        builder.add_layer(0, noise(0, 4, 200, 8))
        return builder.build()

    assert same_stats(built(1), built(1))
    assert not same_stats(built(1), built(2))


@pytest.mark.parametrize(
    ("layer", "queries", "message"),
    [
        (3, noise(0, 4, 9, 8), "layer 3"),
        (-1, noise(0, 4, 9, 8), "layer -1"),
        (0, noise(0, 2, 9, 8), r"\[4, tokens, 8\]"),
        (0, noise(0, 9, 8), r"\[4, tokens, 8\]"),
        (0, noise(0, 4, 0, 8), "empty"),
        (0, noise(0, 4, 9, 8) / 0, "not finite"),
    ],
)
def test_wrong_queries(layer, queries, message):
    with pytest.raises(InvalidArgumentError, match=message):
        StatsBuilder(FACTS, Clustering(2)).add_layer(layer, queries)


def test_layers_missing_or_twice():
    builder = StatsBuilder(FACTS, Clustering(0))
    builder.add_layer(1, noise(0, 4, 9, 8))
    with pytest.raises(InvalidArgumentError, match="added before"):
        builder.add_layer(1, noise(0, 4, 9, 8))
    with pytest.raises(InvalidArgumentError, match=r"\[0, 2\] were not added"):
        builder.build()


def test_a_model_whose_rotation_is_unknown():
    facts = dataclasses.replace(FACTS, rope_problem="NTK is not verified")
    with pytest.raises(InvalidArgumentError, match="NTK is not verified"):
        StatsBuilder(facts, Clustering(2))


def test_covariance_is_that_of_the_queries(monkeypatch):
    monkeypatch.setattr(stats_builder, "CHUNK_TOKENS", 300)
    queries = noise(0, 4, 1000, 8) @ noise(1, 4, 8, 8) + 5
    builder = StatsBuilder(model_facts(1), Clustering(0), covariance=True)
    builder.add_layer(0, queries)
    stats = builder.build()
    expected = torch.stack([torch.cov(head.double().T, correction=0) for head in queries])
    torch.testing.assert_close(stats.q_cov[0].double(), expected, rtol=1e-4, atol=1e-4)
    assert stats.metadata.covariance


@pytest.mark.parametrize(("wish", "limit", "kept"), [(None, 4 * 4 * 64, True), (None, 4 * 4 * 64 - 1, False)])
def test_covariance_is_kept_where_it_is_small(monkeypatch, wish, limit, kept):
    monkeypatch.setattr(stats_builder, "MAX_COVARIANCE_BYTES", limit)
    facts = model_facts(1)
    assert [StatsBuilder(facts, covariance=x).covariance for x in (wish, True, False)] == [kept, True, False]


def test_shared_centres_are_those_of_all_query_heads_of_a_kv_head():
    queries = noise(0, 4, 60, 8) + 20 * torch.arange(4.0)[:, None, None]
    builder = StatsBuilder(model_facts(1), Clustering(2, shared=True))
    builder.add_layer(0, queries)
    stats = builder.build()
    assert stats.metadata.shared_centers
    assert (stats.centers.shape, stats.center_weight.shape) == ((1, 2, 2, 8), (1, 2, 2))
    for kv_head in range(2):
        found = stats.centers[0, kv_head]
        means = queries.mean(1)[2 * kv_head : 2 * kv_head + 2]
        torch.testing.assert_close(found[found[:, 0].argsort()], means, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_centers": -1}, "num_centers"),
        ({"shared": 1}, "shared"),
    ],
)
def test_wrong_clusterings(options, message):
    with pytest.raises(InvalidArgumentError, match=message):
        Clustering(**options)


def test_centres_of_a_sample_are_those_of_the_queries_evenly_over_the_text():
    points = noise(3, 2, 10, 8)
    sampled = Clustering(3, max_points=4).find(points, 1)
    plain = Clustering(3).find(points[:, [0, 2, 5, 7]], 1)
    assert torch.equal(sampled.centers, plain.centers)
    assert torch.equal(sampled.weights, plain.weights)
    assert torch.equal(
        Clustering(3, max_points=10).find(points, 1).centers, Clustering(3).find(points, 1).centers
    )
