"""Digests, packings and scores of pages against what they stand for, written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch

from kvreclaim.compression.recall.digest import (
    LEVELS,
    Digests,
    benefit,
    corners_of,
    digests_of,
    live_mass,
    page_scores,
)
from kvreclaim.compression.recall.packing import order_of, principal
from kvreclaim.schedule.budget.recall import DIGESTS, PACKINGS

KEYS = torch.tensor([[1.0, 2.0], [3.0, 0.0], [2.0, 4.0]])
QUERY = torch.tensor([1.0, -1.0])


def score(lo, hi):
    return float(torch.maximum(QUERY * lo, QUERY * hi).sum())


@pytest.mark.parametrize(("kind", "wanted"), [("minmax", 3.0), ("cuboid_mean", 2.0), ("centroid", 0.0)])
def test_published_example(kind, wanted):
    """K = {(1,2), (3,0), (2,4)}, q = (1,-1): the true maximum is 3."""
    assert score(*corners_of(KEYS, kind)) == pytest.approx(wanted, abs=1e-6)


def test_corners_of_the_example():
    lo, hi = corners_of(KEYS, "cuboid_mean")
    assert lo.tolist() == pytest.approx([4 / 3, 2 / 3])
    assert hi.tolist() == pytest.approx([8 / 3, 10 / 3])


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4])
def test_rounded_bounds_are_bounds(size):
    keys, queries = drawn(2, 7, 16, 24) * size, drawn(2, 5, 24, seed=1)
    found = page_scores(queries, digests_of(keys, keys, "minmax"))
    true = torch.einsum("knd,kpsd->knps", queries.double(), keys.double()).amax(-1)
    assert (found.double() >= true).all()
    exact = corners_of(keys, "minmax")
    loose = torch.einsum("knd,kpd->knp", queries.clamp(min=0), exact[1]) + torch.einsum(
        "knd,kpd->knp", queries.clamp(max=0), exact[0]
    )
    step = keys.abs().amax((-2, -1)) / LEVELS
    assert (found - loose <= 1.01 * step[:, None] * queries.abs().sum(-1)[..., None]).all()


@pytest.mark.parametrize("kind", DIGESTS)
def test_scores_are_those_of_the_corners(kind):
    keys, queries = drawn(2, 4, 16, 8), drawn(2, 3, 8, seed=1)
    digests = digests_of(keys, 2 * keys, kind)
    lo, hi = digests.corners()
    each = torch.maximum(queries[:, :, None] * lo[:, None], queries[:, :, None] * hi[:, None]).sum(-1)
    assert torch.allclose(page_scores(queries, digests), each, atol=1e-5)
    assert torch.allclose(digests.value, 2 * keys.norm(dim=-1).amax(-1))


def test_a_page_of_zeros_scores_nothing():
    keys = torch.zeros(1, 1, 4, 6)
    digests = digests_of(keys, keys, "centroid")
    assert page_scores(drawn(1, 2, 6), digests).abs().max() == 0
    assert benefit(drawn(1, 2, 6), digests, torch.zeros(1, 2), 1.0).isfinite().all()


def test_digests_take_two_bytes_a_dim():
    keys = drawn(3, 5, 16, 64)
    assert digests_of(keys, keys, "minmax").nbytes == 3 * 5 * (2 * 64 + 8)


def test_benefit_is_the_weight_that_a_page_would_have():
    """Of one token a page's digest is the token: its benefit is its softmax weight against the live ones."""
    live, page, query = drawn(1, 9, 8), drawn(1, 1, 1, 8, seed=2), drawn(1, 1, 8, seed=3)
    values = torch.full((1, 1, 1, 8), 0.5)
    lo, hi = corners_of(page, "centroid")
    digests = SimpleNamespace()
    digests = digests_of(page, values, "centroid")
    found = benefit(query, digests, live_mass(query, live, 0.3), 0.3)
    logits = (live[0] @ query[0, 0]) * 0.3
    own = float(page[0, 0, 0] @ query[0, 0]) * 0.3
    wanted = own - float(torch.logsumexp(logits, 0)) + math.log(0.5 * math.sqrt(8))
    assert float(found) == pytest.approx(wanted, abs=0.05)
    assert torch.equal(lo, hi)


@pytest.mark.parametrize("kind", PACKINGS)
def test_packed_tokens_come_first_each_once(kind):
    keys, positions = drawn(3, 40, 8), torch.arange(40).expand(3, -1)
    packed = drawn(3, 40, seed=4) > 0
    order = order_of(kind, keys, positions, packed, 4)
    assert (order.sort(-1).values == torch.arange(40)).all()
    first = packed.take_along_dim(order, -1)
    count = packed.sum(-1, keepdim=True)
    assert (first == (torch.arange(40) < count)).all()


def test_time_keeps_neighbours():
    positions = torch.tensor([[5, 1, 9, 3]])
    packed = torch.tensor([[True, True, False, True]])
    assert order_of("time", positions[..., None], positions, packed, 2)[0, :3].tolist() == [1, 3, 0]


def test_principal_direction_is_that_of_most_variance():
    keys = drawn(2, 200, 6) * torch.tensor([1.0, 1.0, 9.0, 1.0, 1.0, 1.0])
    keys = keys - keys.mean(1, keepdim=True)
    along = principal(keys)
    for row in range(2):
        correlation = torch.corrcoef(torch.stack([along[row], keys[row, :, 2]]))[0, 1]
        assert abs(float(correlation)) > 0.98


def spread(keys, order, size):
    pages = keys.take_along_dim(order[..., None], 1).unflatten(1, (-1, size))
    return float((pages - pages.mean(2, keepdim=True)).square().sum())


def test_clusters_are_tighter_than_time():
    """Four kinds of keys that take turns: each page of a cluster holds one kind."""
    centres = drawn(4, 8) * 5
    keys = (centres[torch.arange(64) % 4] + 0.1 * drawn(64, 8, seed=1))[None]
    positions, packed = torch.arange(64)[None], torch.ones(1, 64, dtype=torch.bool)
    apart = {kind: spread(keys, order_of(kind, keys, positions, packed, 16), 16) for kind in PACKINGS}
    assert apart["kmeans"] < 0.05 * apart["time"]


def test_digests_are_written_in_place():
    keys = drawn(5, 16, 8)
    empty = Digests(torch.zeros(2, 3, 2, 8, dtype=torch.int8), torch.zeros(2, 3), torch.zeros(2, 3))
    at = torch.tensor([1, 0]), torch.tensor([2, 0])
    empty.put(at, digests_of(keys[:2], keys[:2], "minmax"))
    assert empty[1].scale[2] > 0
    assert empty.scale.count_nonzero() == 2
