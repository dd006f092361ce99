"""Scales of key channels follow biases and norms, and are exact and alike in both dims of a band."""

from __future__ import annotations

import math

import pytest
import tiny
import torch

from kvreclaim.model.key_scales import key_scales, scales_digest
from kvreclaim.model.loader import load_model


def loaded(family, path, change=None, **overrides):
    model = tiny.build(family, 5, **overrides)
    if change is not None:
        with torch.no_grad():
            for layer in model.model.layers:
                change(layer.self_attn)
    model.save_pretrained(path)
    found = load_model(path, dtype="float32", device="cpu")
    return key_scales(found.model, found.facts)


def check(scales, heads, dim):
    for own in scales:
        assert own.shape == (heads, dim)
        assert torch.equal(own.log2(), own.log2().round())
        assert torch.equal(own[:, : dim // 2], own[:, dim // 2 :])


def biased(attention):
    attention.q_proj.bias.zero_()
    attention.k_proj.bias.zero_()
    attention.k_proj.bias[2] = 512.0  # of head 0; its band's other dim is 10


def test_biases(tmp_path):
    """d = sqrt(K / Q), K^2 = 512^2 / 2 + 4, Q^2 = 4, both with the floor, less the mean of the head's
    logarithms; a head without biases has none."""
    scales = loaded("qwen2", tmp_path, biased)
    check(scales, 2, 16)
    for own in scales:
        assert own[0, 2] == own[0, 10] == own[0].max()
        rest = own[0, [0, 1, 3, 4]]
        assert (rest == rest[0]).all()
        floor = (512**2 / 16 + 4) / 256
        first, other = (math.log2((k + floor) / (4 + 4 / 256)) / 4 for k in (512**2 / 2 + 4, 4))
        mean = (first + 7 * other) / 8
        assert own[0, 2] == 2.0 ** round(first - mean)
        assert rest[0] == 2.0 ** round(other - mean)
        assert (own[1] == 1).all()


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_norms(family, tmp_path):
    def uneven(attention):
        one = 0.0 if family == "gemma3" else 1.0  # Gemma's weights are added to one
        attention.q_norm.weight.fill_(one)
        attention.k_norm.weight.fill_(one)
        attention.k_norm.weight[[5, 13]] = one + 15

    scales = loaded(family, tmp_path, uneven)
    dim = scales[0].shape[1]
    for own in scales:
        first = own[0, 5]
        assert (own[:, 5] == first).all()
        assert first / own[0, 0] == 4
        assert dim == 16


def test_none_where_nothing_tells_them(tmp_path):
    assert loaded("llama", tmp_path / "a") is None
    assert loaded("deepseek-v3", tmp_path / "b") is None

    def even(attention):
        for linear in (attention.q_proj, attention.k_proj):
            linear.bias.zero_()

    assert loaded("qwen2", tmp_path / "c", even) is None


def test_digests_tell_scales_apart(tmp_path):
    scales = loaded("qwen2", tmp_path, biased)
    other = (scales[0], scales[1].clone())
    assert scales_digest(scales) == scales_digest(other)
    other[1][1, 3] *= 2
    assert scales_digest(scales) != scales_digest(other)
