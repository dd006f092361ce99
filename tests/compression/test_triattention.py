"""The published score against loops, and against what it means."""

import pytest
import torch
from compression_oracles import layer_facts, layer_view, layout, noise, triattention_scores, with_kv

from kvreclaim.compression.policies.triattention import OFFSETS, HeadQueries, TriAttention
from kvreclaim.compression.stats import LayerStats
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.ops.key_source import DenseSource
from kvreclaim.ops.rope import from_bands, rotate, to_bands
from kvreclaim.ops.scoring import group_max, offset_phases, z_scores


def complex_noise(seed, *shape):
    return torch.complex(noise(seed, *shape), noise(seed + 1, *shape))


def scored(keys, q_mean, q_abs, rope, logical_len, **options):
    queries = HeadQueries(from_bands(q_mean, q_mean.real[:, :0], rope), q_abs, rope)
    return queries.scores([(DenseSource(keys, keys), logical_len)], TriAttention(**options))[0]


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("aggregate", ["mean", "max"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 2), (6, 1), (3, 3)])
def test_scores_equal_the_loop(style, aggregate, heads, kv_heads):
    rope = layout(3, style)
    keys, mean, size = noise(0, kv_heads, 5, 6), complex_noise(1, heads, 3), noise(3, heads, 3).abs()
    real = from_bands(mean, mean.real[:, :0], rope)
    expected = triattention_scores(keys, real, size, rope, 77, aggregate=aggregate)
    got = scored(keys, mean, size, rope, 77, aggregate=aggregate)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)


def test_the_offsets_are_the_published_ones():
    assert (OFFSETS[0], OFFSETS[-1], len(OFFSETS)) == (1, 65536, 17)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_trig_part_is_the_mean_product_of_rotated_query_and_rotated_key(style):
    rope = layout(4, style)
    keys, mean = noise(0, 1, 6, 8, dtype=torch.float64), complex_noise(5, 2, 4)
    positions = torch.tensor([0, 3, 50, 51, 90, 99])
    rotated = rotate(keys.float(), positions, rope).double()
    query = from_bands(mean, mean.real[:, :0], rope)
    times = torch.tensor([100 + d for d in OFFSETS])
    turned = rotate(query[:, None].expand(-1, len(OFFSETS), -1), times, rope).double()
    expected = (turned @ rotated[0].T).mean(dim=1)
    got = scored(rotated, mean, mean.abs().double(), rope, 100)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_phases_are_exact_at_131072():
    rope = layout(4, theta=1e6)
    keys = noise(0, 1, 4, 8, dtype=torch.float64)
    mean = complex_noise(1, 1, 4)
    real = from_bands(mean, mean.real[:, :0], rope)
    expected = triattention_scores(keys, real, mean.abs(), rope, 131_072)
    torch.testing.assert_close(scored(keys, mean, mean.abs(), rope, 131_072), expected, rtol=1e-6, atol=1e-6)
    many = layout(64, theta=1e6)
    exact = offset_phases([131_072], OFFSETS, many)[0]
    angle = torch.tensor([131_072.0 + d for d in OFFSETS])[:, None] * many.inv_freq.float()
    coarse = torch.polar(torch.ones_like(angle), angle)
    assert (exact - coarse).abs().max() > 1e-3


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("options", [{}, {"aggregate": "max"}, {"use_trig": False}, {"use_norm": False}])
def test_policy_with_partial_rotation_equals_the_loop(style, start, options):
    rope = layout(2, style, start)
    mean, size = noise(0, 4, 8), 2 + noise(1, 4, 3).abs()
    view = layer_view(layer_facts(rope), LayerStats(mean, size))
    aggregate = options.get("aggregate", "mean")
    raw = triattention_scores(view.keys, mean, size[:, :2], rope, 40, aggregate=aggregate)
    no_norm = to_bands(mean, rope).abs()
    trig = triattention_scores(view.keys, mean, no_norm, rope, 40, aggregate=aggregate)
    raw = {"use_trig": raw - trig, "use_norm": trig}.get(next(iter(options), ""), raw)
    part = raw[:, view.candidates]
    z = (raw - part.mean(1, keepdim=True)) / part.std(1, correction=0, keepdim=True)
    expected = torch.stack([z[:2].amax(0), z[2:].amax(0)])
    torch.testing.assert_close(TriAttention(**options).score(view).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_without_rotation_is_scored_by_plain_products():
    mean = noise(0, 4, 8)
    view = layer_view(layer_facts(layout(0)), LayerStats(mean, mean.new_zeros(4, 0)))
    raw = torch.cat([mean[:2] @ view.keys[0].T, mean[2:] @ view.keys[1].T])
    torch.testing.assert_close(TriAttention().score(view), group_max(z_scores(raw, view.candidates), 2))


class TestZScores:
    def test_population_deviation_over_the_candidates(self):
        got = z_scores(torch.tensor([[100.0, 1.0, 3.0, -50.0]]), slice(1, 3))
        torch.testing.assert_close(got, torch.tensor([[98.0, -1.0, 1.0, -52.0]]))

    @pytest.mark.parametrize("value", [0.0, 1234.567, -1e-30, 3e30])
    def test_a_constant_row_gives_zeros(self, value):
        assert torch.equal(z_scores(torch.full((2, 1000), value), slice(0, 1000)), torch.zeros(2, 1000))

    def test_no_candidates_give_zeros(self):
        assert torch.equal(z_scores(noise(0, 2, 5), slice(3, 3)), torch.zeros(2, 5))

    def test_one_candidate_gives_no_nan(self):
        assert z_scores(noise(0, 2, 5), slice(3, 4)).isfinite().all()


def test_a_score_of_nothing_is_refused():
    with pytest.raises(InvalidArgumentError, match="both false"):
        TriAttention(use_trig=False, use_norm=False)


def test_bf16_keys_are_scored_in_fp32():
    rope = layout(4)
    stats = LayerStats(noise(0, 4, 8), noise(1, 4, 4).abs())
    view = layer_view(layer_facts(rope), stats)
    half = with_kv(view, keys=view.keys.bfloat16())
    same = with_kv(view, keys=view.keys.bfloat16().float())
    assert torch.equal(TriAttention().score(half), TriAttention().score(same))
