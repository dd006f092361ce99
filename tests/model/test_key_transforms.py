"""Centres are means of rotated keys; scales follow energies, are exact, and alike in both dims of a band."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tiny
import torch

from kvreclaim.calibrate.calibration import calibrate
from kvreclaim.compression.stats_builder import Clustering, StatsBuilder
from kvreclaim.model.capture import capture_queries
from kvreclaim.model.key_transforms import key_transforms, transforms_digest
from kvreclaim.model.loader import load_model
from kvreclaim.ops.key_transform import (
    LENGTHS,
    LONGEST,
    SHORTEST,
    KeyStats,
    KeyTransform,
    directions_of,
    rotated_moment,
)
from kvreclaim.ops.rope import rotate


def load(family, path, change=None, **overrides):
    model = tiny.build(family, 5, **overrides)
    if change is not None:
        with torch.no_grad():
            for layer in model.model.layers:
                change(layer.self_attn)
    model.save_pretrained(path)
    return load_model(path, dtype="float32", device="cpu")


def loaded(family, path, change=None, **overrides):
    found = load(family, path, change, **overrides)
    return key_transforms(found.model, found.facts, None)


def mean_over_positions(mean, rope, longest):
    """The mean of a rotated key over all positions below n, then over lengths n."""
    ratio = longest / SHORTEST
    lengths = [round(SHORTEST * ratio ** (i / (LENGTHS - 1))) for i in range(LENGTHS)]
    every = rotate(mean[:, None].double().expand(-1, longest, -1), torch.arange(longest), rope).double()
    sums = every.cumsum(1)
    return torch.stack([sums[:, n - 1] / n for n in lengths]).mean(0).float()


def assert_near(center, want, size):
    """An integral over positions differs from the sum by at most one of SHORTEST of the terms."""
    torch.testing.assert_close(center, want, rtol=0, atol=float(size) / SHORTEST)


def biased(attention):
    attention.q_proj.bias.zero_()
    attention.k_proj.bias.zero_()
    attention.k_proj.bias[2] = 512.0  # of head 0; its band's other dim is 10


def test_biases(tmp_path):
    """The centre is the bias as rotation leaves it in the mean; of the energy, what is left of it and 4 for
    each channel. d = (K / Q)^(1/4), both with the floor, less the mean of the head's logarithms; a head
    without biases has none."""
    model = load("qwen2", tmp_path, biased)
    rope = model.facts.layers[0].rope
    bias = torch.zeros(2, 16)
    bias[0, 2] = 512.0
    want = mean_over_positions(bias, rope, model.facts.max_position)
    assert want[0, [2, 10]].square().sum().sqrt() < 500  # it does turn
    for own in key_transforms(model.model, model.facts, None):
        assert_near(own.center, want, 512.0)
        scale = own.scale
        assert torch.equal(scale.log2(), scale.log2().round())
        assert torch.equal(scale[:, :8], scale[:, 8:])
        assert scale[0, 2] == scale[0].max()
        rest = scale[0, [0, 1, 3, 4]]
        assert (rest == rest[0]).all()
        left = (512**2 - own.center[0].square().sum().item()) / 2 + 4
        floor = (2 * left + 14 * 4) / 16 / 256
        first, other = (math.log2((k + floor) / (4 + 4 / 256)) / 4 for k in (left, 4))
        mean = (first + 7 * other) / 8
        assert scale[0, 2] == 2.0 ** round(first - mean)
        assert rest[0] == 2.0 ** round(other - mean)
        assert (scale[1] == 1).all()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_norms(family, tmp_path):
    def uneven(attention):
        one = 0.0 if family == "gemma3" else 1.0  # Gemma's weights are added to one
        attention.q_norm.weight.fill_(one)
        attention.k_norm.weight.fill_(one)
        attention.k_norm.weight[[5, 13]] = one + 15

    for own in loaded(family, tmp_path, uneven):
        first = own.scale[0, 5]
        assert (own.scale[:, 5] == first).all()
        assert first / own.scale[0, 0] == 4
        assert (own.center == 0).all()


def test_statistics_of_keys_are_their_means_and_energies(tmp_path):
    """Only first copies count where a document is repeated: the oracle reads each document once."""
    model = load("qwen2", tmp_path)
    documents = tiny.prompts((150, 80), seed=5)
    keys, queries = {}, {}
    capture_queries(model, documents, queries.__setitem__, on_keys=keys.__setitem__)
    found = calibrate(model, documents, num_centers=0).keys()
    for layer, own in enumerate(found):
        assert keys[layer].shape == (2, 230, 16)
        torch.testing.assert_close(own.mean, keys[layer].mean(1), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(own.energy, keys[layer].square().mean(1), rtol=1e-4, atol=1e-5)
        by_head = queries[layer].square().mean(1).unflatten(0, (2, -1)).mean(1)
        torch.testing.assert_close(own.query_energy, by_head, rtol=1e-4, atol=1e-5)


def test_statistics_come_before_weights(tmp_path):
    model = load("llama", tmp_path)
    rope, mean = model.facts.layers[0].rope, torch.randn(2, 16, generator=torch.manual_seed(0))
    own = KeyStats(mean, mean.square() + 1, torch.ones(2, 16))
    found = key_transforms(model.model, model.facts, [own] * model.facts.num_layers)
    want = mean_over_positions(mean, rope, model.facts.max_position)
    assert_near(found[0].center, want, mean.abs().max())
    far = replace(model.facts, max_position=8 * LONGEST)
    capped = key_transforms(model.model, far, [own] * model.facts.num_layers)
    want = mean_over_positions(mean, rope, LONGEST)
    assert_near(capped[0].center, want, mean.abs().max())


@pytest.mark.parametrize("family", ["gpt-oss", "gemma2"])
def test_keys_that_meet_more_than_a_softmax_keep_their_mean(family, tmp_path):
    """Sinks and soft-capping see a constant that all keys of a query share."""
    model = load(family, tmp_path)
    shape = model.facts.layers[0].num_kv_heads, model.facts.layers[0].head_dim
    own = KeyStats(torch.ones(shape), torch.logspace(0, 6, shape[1]).expand(shape), torch.ones(shape))
    found = key_transforms(model.model, model.facts, [own] * model.facts.num_layers)
    assert all((each.center == 0).all() for each in found)
    assert all(each.scale.unique().numel() > 1 for each in found)


def test_none_where_nothing_tells_them(tmp_path):
    assert loaded("llama", tmp_path / "a") is None
    assert loaded("deepseek-v3", tmp_path / "b") is None

    def even(attention):
        for linear in (attention.q_proj, attention.k_proj):
            linear.bias.zero_()

    assert loaded("qwen2", tmp_path / "c", even) is None


def test_digests_tell_transforms_apart():
    scale, center = torch.ones(2, 16), torch.zeros(2, 16)
    own = (KeyTransform(scale, center), KeyTransform(scale.clone(), center.clone()))
    digests = {transforms_digest(own)}
    assert transforms_digest([KeyTransform(scale.clone(), center)] * 2) in digests
    own[1].scale[1, 3] *= 2
    digests.add(transforms_digest(own))
    own[1].center[1, 3] = 2
    digests.add(transforms_digest(own))
    for gain in (2.0, 3.0):
        along = torch.eye(16)[None, :1].expand(2, -1, -1), torch.full((2, 1), gain)
        digests.add(transforms_digest([replace(each, directions=along[0], gains=along[1]) for each in own]))
    assert len(digests) == 5


def loss(along, keys, queries):
    """tr(B K B^T) tr(B^-T Q B^-1), of codes of rotated vectors."""
    directions, gains = along
    outer = directions.transpose(1, 2)
    maps = [torch.eye(keys.shape[-1]) + outer @ ((g[..., None] - 1) * directions) for g in (gains, 1 / gains)]
    (stored, met) = (x @ m @ x.transpose(1, 2) for x, m in zip(maps, (keys, queries), strict=True))
    return stored.diagonal(dim1=1, dim2=2).sum(-1) * met.diagonal(dim1=1, dim2=2).sum(-1)


def test_directions_balance_keys_and_queries():
    """The loss of as many directions as dims is least: the square of tr((K^1/2 Q K^1/2)^1/2), by singular
    values of the product of roots. Four take most of it where keys have one far direction."""
    generator, dim = torch.Generator().manual_seed(3), 16
    shape = 3, dim, dim
    roots = [torch.randn(shape, generator=generator).tril() + 2 * torch.eye(dim) for _ in range(2)]
    roots[0][:, 0] *= 20
    keys, queries = (root @ root.transpose(1, 2) for root in roots)
    plain = KeyTransform(torch.ones(3, dim), torch.zeros(3, dim))
    none = keys.diagonal(dim1=1, dim2=2).sum(-1) * queries.diagonal(dim1=1, dim2=2).sum(-1)
    least = torch.linalg.svdvals(roots[0].transpose(1, 2) @ roots[1]).sum(-1).square()
    all_of_them = loss(directions_of(plain, keys, queries, dim), keys, queries)
    few = loss(directions_of(plain, keys, queries), keys, queries)
    assert (all_of_them < 1.1 * least).all()  # a floor under each moment
    assert (all_of_them > 0.999 * least).all()
    assert (few < 0.75 * none).all()
    assert (few >= all_of_them).all()


def test_moments_are_of_rotated_rows_at_all_positions(tmp_path):
    """Moments of one row at every position: as many lengths as positions, all of one size equally likely."""
    facts = load("llama", tmp_path).facts
    rope, row = facts.layers[0].rope, torch.randn(2, 16, generator=torch.manual_seed(1))
    found = rotated_moment(row[:, None].expand(-1, 40_000, -1), rope, LONGEST)
    every = rotate(row[:, None].expand(-1, LONGEST, -1), torch.arange(LONGEST), rope)
    lengths = SHORTEST * (LONGEST / SHORTEST) ** ((torch.arange(4000) + 0.5) / 4000)
    weight = torch.zeros(LONGEST, dtype=torch.float64)
    for length in lengths.long().tolist():
        weight[:length] += 1 / length / 4000
    want = torch.einsum("p,kpd,kpe->kde", weight.float(), every, every)
    torch.testing.assert_close(found, want, rtol=0, atol=0.03)
    mean = torch.einsum("p,kpd->kd", weight.float(), every)
    centred = rotated_moment(row[:, None].expand(-1, 40_000, -1), rope, LONGEST, mean)
    torch.testing.assert_close(centred, want - mean[:, :, None] * mean[:, None], rtol=0, atol=0.03)


def test_first_keys_are_a_quarter_of_all(tmp_path):
    """A model of one document: the moment that directions are of holds its first key as a rank of one."""
    facts = load("qwen2", tmp_path).facts
    builder = StatsBuilder(facts, Clustering(0), covariance=False)
    first = torch.zeros(2, 16)
    first[:, 3] = 30.0
    for layer in range(facts.num_layers):
        generator = torch.manual_seed(layer)
        keys = torch.randn(2, 500, 16, generator=generator)
        keys[:, 0] = keys[:, 200] = first
        builder.add_layer(layer, torch.randn(4, 500, 16, generator=generator))
        builder.add_keys(layer, keys, firsts=[0, 200])
    stats = builder.build()
    for own in stats.keys():  # noqa: SIM118
        gain, found = own.gains.min(-1)
        direction = own.directions[torch.arange(2), found]
        assert (direction[:, 3].abs() > 0.9).all()
        assert (gain < 0.5).all()
        assert own.directions.shape == (2, 4, 16)
