"""Clusters that are dropped and pooled."""

import pytest
import torch
from compression_oracles import noise

from kvreclaim.compression.kmeans import Clusters, kmeans
from kvreclaim.compression.merging import merge_clusters, num_distinct


def clusters(weights, places):
    """One head, one dim a cluster's place, variance 1 in it."""
    centers = torch.tensor(places)[None, :, None]
    return Clusters(centers, torch.ones_like(centers), torch.tensor([weights]))


def test_nothing_to_merge_only_sorts():
    found = merge_clusters(clusters([0.2, 0.5, 0.3], [1.0, 5.0, 9.0]), 0.0, 0.0)
    assert found.centers[0, :, 0].tolist() == [5.0, 9.0, 1.0]
    torch.testing.assert_close(found.weights, torch.tensor([[0.5, 0.3, 0.2]]))


def test_a_rare_cluster_goes_and_its_weight_to_the_nearest():
    found = merge_clusters(clusters([0.5, 0.45, 0.05], [0.0, 10.0, 8.0]), 0.1, 0.0)
    assert found.centers[0, :, 0].tolist() == [0.0, 10.0, 0.0]
    torch.testing.assert_close(found.weights, torch.tensor([[0.5, 0.5, 0.0]]))
    assert num_distinct(found.weights) == 2


@pytest.mark.parametrize("weights", [[0.4, 0.3, 0.3], [0.4, 0.4, 0.2]], ids=["one", "the first of two"])
def test_the_heaviest_stays_whatever_the_threshold(weights):
    found = merge_clusters(clusters(weights, [0.0, 10.0, 8.0]), 1.0, 0.0)
    assert found.weights.tolist() == [[1.0, 0.0, 0.0]]
    assert found.centers[0, :, 0].tolist() == [0.0, 0.0, 0.0]


def test_pooling_keeps_the_moments():
    """Pooling all of a head's clusters gives the mean and variance of its queries."""
    points = noise(0, 2, 500, 4) * torch.arange(1.0, 5.0)
    found = merge_clusters(kmeans(points, 6, 0), 0.0, 1e9)
    assert num_distinct(found.weights) == 1
    torch.testing.assert_close(found.centers[:, 0], points.mean(1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variances[:, 0], points.var(1, correction=0), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(found.weights[:, 0], torch.ones(2))


def test_the_distance_counts_in_spreads_of_the_head():
    """Spread: sqrt(var of the places + 1); 100 and 101 lie 1 apart in a head of spread about 50."""
    near = clusters([0.5, 0.25, 0.25], [0.0, 100.0, 101.0])
    assert num_distinct(merge_clusters(near, 0.0, 0.019).weights) == 3
    merged = merge_clusters(near, 0.0, 0.021)
    assert merged.centers[0, :2, 0].tolist() == [0.0, 100.5]
    torch.testing.assert_close(merged.variances[0, 1, 0], torch.tensor(1.25))


@pytest.mark.parametrize("empty", [0, 2])
def test_empty_clusters_count_for_nothing(empty):
    weights = [0.5, 0.5, 0.5]
    weights[empty] = 0.0
    found = merge_clusters(clusters(weights, [3.0, 4.0, 3.0]), 0.0, 0.0)
    assert num_distinct(found.weights) == 2
    assert set(found.centers[0, :, 0].tolist()) == {3.0, 4.0}
