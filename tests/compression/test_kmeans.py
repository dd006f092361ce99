"""Clusters of queries."""

import pytest
import torch
from compression_oracles import noise

from kvreclaim.compression import kmeans as module
from kvreclaim.compression.kmeans import kmeans
from kvreclaim.errors import InvalidArgumentError


def blobs(num_heads=2, num_clusters=5, each=40, dim=6):
    """Clusters far apart, their sizes 40, 80, ...; returns points [H, T, D], centres, labels."""
    centers = 30 * noise(1, num_heads, num_clusters, dim)
    labels = torch.cat([torch.full((each * (n + 1),), n) for n in range(num_clusters)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(2))]
    return centers[:, labels] + noise(3, num_heads, len(labels), dim), centers, labels


@pytest.mark.parametrize("seed", range(4))
def test_separated_clusters_are_found(seed):
    points, centers, labels = blobs()
    found = kmeans(points, 5, seed)
    for head in range(2):
        match = torch.cdist(centers[head], found.centers[head]).argmin(dim=1)
        assert sorted(match.tolist()) == list(range(5))
        for n, c in enumerate(match.tolist()):
            members = points[head, labels == n]
            torch.testing.assert_close(found.centers[head, c], members.mean(0), rtol=1e-4, atol=1e-4)
            variance = members.var(0, correction=0)
            torch.testing.assert_close(found.variances[head, c], variance, rtol=1e-3, atol=1e-3)
            assert found.weights[head, c].item() == pytest.approx(len(members) / len(labels))


def test_a_seed_decides_and_heads_do_not_mix():
    points, _, _ = blobs()
    first, second, other = kmeans(points, 4, 7), kmeans(points, 4, 7), kmeans(points, 4, 8)
    assert torch.equal(first.centers, second.centers)
    assert not torch.equal(first.centers, other.centers)
    moved = torch.stack([points[0], points[1] + 5])
    torch.testing.assert_close(kmeans(moved, 4, 7).centers[0], first.centers[0])


def test_the_global_generator_is_left_alone():
    before = torch.get_rng_state()
    kmeans(noise(0, 1, 20, 4), 3, 0)
    assert torch.equal(before, torch.get_rng_state())


def test_chunks_give_what_one_piece_gives(monkeypatch):
    points, _, _ = blobs()
    whole = kmeans(points, 5, 1)
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 7 * 2 * 6)
    parts = kmeans(points, 5, 1)
    torch.testing.assert_close(parts.centers, whole.centers, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(parts.variances, whole.variances, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num_points", [1, 2, 3])
def test_fewer_queries_than_clusters(num_points):
    points = noise(0, 2, num_points, 4)
    found = kmeans(points, 5, 0)
    assert (found.weights > 0).sum(dim=1).tolist() == [num_points] * 2
    nearest = torch.cdist(points, found.centers).amin(dim=2)
    torch.testing.assert_close(nearest, torch.zeros_like(nearest), rtol=0, atol=1e-3)
    assert torch.equal(found.variances, torch.zeros_like(found.variances))


def test_equal_queries_make_one_cluster_and_its_copies():
    found = kmeans(torch.full((1, 50, 4), 3.0), 4, 0)
    assert found.weights.max() == 1.0
    assert torch.equal(found.centers, torch.full((1, 4, 4), 3.0))


def test_no_queries_are_refused():
    with pytest.raises(InvalidArgumentError, match="at least 1 token"):
        kmeans(torch.zeros(2, 0, 4), 3, 0)


def test_no_cluster_stays_empty_when_points_differ():
    points = torch.cat([torch.zeros(1, 500, 2), noise(0, 1, 12, 2)], dim=1)
    assert (kmeans(points, 8, 0).weights > 0).all()


def test_empty_clusters_move_to_the_farthest_points():
    points = torch.tensor([[[0.0], [1.0], [9.0], [4.0]]])
    labels, distances = torch.zeros(1, 4, dtype=torch.int64), points[..., 0].square()
    counts, means = torch.tensor([[0.0, 4.0, 0.0]]), torch.tensor([[[0.0], [3.5], [0.0]]])
    moved = module._reseed(points, module._Grouping(labels, distances, counts, means))
    assert moved.tolist() == [[[9.0], [3.5], [4.0]]]


def test_bf16_queries_are_summed_in_fp32():
    points = noise(0, 2, 3000, 4).bfloat16()
    found = kmeans(points, 1, 0)
    torch.testing.assert_close(found.centers[:, 0], points.double().mean(1).float(), rtol=1e-5, atol=1e-6)
