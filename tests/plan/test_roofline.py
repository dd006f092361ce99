"""The time of a step from a data sheet is the roofline's, and cards are found by any of their names."""

from __future__ import annotations

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.plan.cards import all_cards, find_card
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.cost import StepLoad, WithExperts
from kvreclaim.plan.roofline import BASE_S, roofline
from kvreclaim.plan.weights import WEIGHTS

BF16 = KV_BYTES["bf16"]


def test_a_dense_model() -> None:
    shape, card = load_shape("Llama-3.1-8B"), find_card("H100")
    time = roofline(shape, card, WEIGHTS["bf16"], BF16)
    read = 2 * (shape.num_params - 128_256 * 4096) / (0.8 * 3.35e12)
    keys = 1000 * 131_072 / (0.8 * 3.35e12)
    assert time.step_s(StepLoad(1, 1, 1000)) == pytest.approx(BASE_S + read + keys)
    flops = 2 * 6.979321856e9 * 2048 + 4 * 32 * 32 * 128 * 2048 * 1024
    want = BASE_S + flops / (0.6 * 989e12)
    assert time.step_s(StepLoad(2048, 1, 0, 2048 * 1024)) == pytest.approx(want)
    two = roofline(shape, card, WEIGHTS["bf16"], BF16, num_cards=2)
    assert two.base - BASE_S - 64 * 10e-6 == pytest.approx(read / 2)
    assert two.token == pytest.approx(64 * 2 * 4096 / 450e9)
    assert two.kv == pytest.approx(time.kv / 2)


def test_experts_are_read_as_far_as_tokens_touch_them() -> None:
    shape = load_shape("Qwen3-30B-A3B")
    time = roofline(shape, find_card("H100"), WEIGHTS["bf16"], BF16)
    assert isinstance(time, WithExperts)
    one, many = (time.step_s(StepLoad(n, 1, 0)) - time.base for n in (1, 100))
    assert one == pytest.approx(time.experts * 8 / 128)
    assert many == pytest.approx(time.experts * (1 - (15 / 16) ** 100))
    total = 2 * 2.717908992e9 * 10**5 / (0.6 * 989e12)
    assert time.step_s(StepLoad(10**5, 1, 0)) == pytest.approx(BASE_S + total)
    assert shape.layers[0].experts.touched(1) == pytest.approx(8)


def test_latents_are_not_divided_among_cards() -> None:
    shape, card = load_shape("DeepSeek-V3"), find_card("H200")
    one, eight = (roofline(shape, card, WEIGHTS["fp8"], BF16, num_cards=n) for n in (1, 8))
    assert one.kv == pytest.approx(eight.kv) == pytest.approx(70_272 / (0.8 * 4.8e12))
    assert eight.experts == pytest.approx(one.experts / 8)


def test_windows_read_less() -> None:
    shape = load_shape("gemma-3-27b-it")
    assert shape.read_share(1024) == 1.0
    assert shape.read_share(10_240) == pytest.approx((10 + 52 / 10) / 62)
    whole, part = (
        roofline(shape, find_card("H100"), WEIGHTS["bf16"], BF16, read_share=r) for r in (1.0, 0.25)
    )
    assert part.kv == whole.kv / 4


def test_cards_are_found_by_any_name_and_no_two_share_one() -> None:
    names = [name for card in all_cards() for name in {card.name.lower(), *card.aliases}]
    assert len(names) == len(set(names))
    assert find_card("NVIDIA GeForce RTX 4090").usable_bytes == 25_250_627_584
    assert find_card("rtx4090") is find_card("4090")
    assert find_card("L4").priced(9.0).price == (9.0, 9.0)
    assert all(card.date == "2026-03" for card in all_cards())
    with pytest.raises(InvalidArgumentError, match=r"--gpu 'voodoo' is not known; known are A100, H100"):
        find_card("voodoo")
