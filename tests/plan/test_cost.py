"""The time of a step: the formula, and its file."""

from __future__ import annotations

import json
import math
import random
from functools import partial

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.kv_bytes import KV_BYTES
from kvreclaim.plan.cards import all_cards, find_card
from kvreclaim.plan.configs import load_shape
from kvreclaim.plan.cost import Linear, StepLoad, Stepped, WithExperts
from kvreclaim.plan.fit import fit_steps
from kvreclaim.plan.roofline import BASE_S, roofline
from kvreclaim.plan.weights import WEIGHTS


def test_terms_add_up():
    cost = Linear(base=1.0, token=0.5, beyond=0.25, knee=4, kv=2.0, pair=3.0, seq=-0.125)
    assert cost.step_s(StepLoad(3, 2, 5, 7.0)) == 1.0 + 1.5 + 10 + 21 - 0.25
    assert cost.step_s(StepLoad(6, 1)) == 1.0 + 3.0 + 0.25 * 2 - 0.125


def test_a_roofline_is_the_larger_of_two():
    weights, per_token = 15e-3, 90e-6
    cost = Linear(base=weights, beyond=per_token, knee=weights / per_token)
    for num_tokens in (1, 100, 166, 167, 2048):
        assert math.isclose(cost.step_s(StepLoad(num_tokens)), max(weights, per_token * num_tokens))


def test_what_kernels_add():
    """At the knots, between them and beyond, on top of the same terms."""
    plain = Linear(base=1.0, token=0.5, beyond=0.25, knee=4, kv=2.0, pair=3.0, seq=-0.125)
    terms = {name: getattr(plain, name) for name in ("base", "token", "beyond", "knee", "kv", "pair", "seq")}
    stepped = Stepped(**terms, knots=(2.0, 4.0, 5.0), more=(0.0, 1.0, 3.0))
    for tokens, more in ((1, 0.0), (2, 0.0), (3, 0.5), (4, 1.0), (5, 3.0), (99, 3.0)):
        load = StepLoad(tokens, 2, 5, 7.0)
        assert stepped.step_s(load) == plain.step_s(load) + more


KIND_NAMES = [
    Linear,
    partial(WithExperts, dense=1.0, experts=2.0, missed=3.0, flop=4.0),
    partial(Stepped, knots=(1.0, 2.0), more=(0.0, -0.5)),
]


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_a_file_holds_all_of_it(tmp_path, kind):
    cost = kind(0.1, 0.2, 0.3, 0.4, -0.5, 0.6, 77.5, 0.8, 0.9, {"device": "a card"})
    cost.save(tmp_path / "speed.json")
    found = Linear.load(tmp_path / "speed.json")
    assert found == cost
    assert found.facts == {"device": "a card"}


@pytest.mark.parametrize(
    "change", [{"version": 2}, {"base": "fast"}, {"kv": None}, {"more": 1}, {"seq": True}]
)
def test_another_file_is_one_sentence(tmp_path, change):
    path = tmp_path / "speed.json"
    Linear(0.1).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(InvalidArgumentError, match=r"speed.json is no calibration of version 1.*speed`"):
        Linear.load(path)


@pytest.mark.parametrize("text", [None, "no JSON", "[]"])
def test_no_calibration_at_all(tmp_path, text):
    path = tmp_path / "speed.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InvalidArgumentError, match="calibrate-speed"):
        Linear.load(path)


def steps(count: int, seed: int = 0) -> list[StepLoad]:
    rng = random.Random(seed)
    found = []
    for _ in range(count):
        decodes, chunk = rng.randrange(1, 64), rng.choice([0, 0, rng.randrange(1, 2048)])
        keys = sum(rng.randrange(1, 2000) for _ in range(decodes))
        pairs = chunk * (rng.randrange(2000) + chunk / 2)
        found.append(StepLoad(decodes + chunk, decodes + (chunk > 0), keys, pairs, decodes))
    return found


def test_exact_terms_are_found_again():
    made = Linear(base=16.8e-3, token=5.9e-5, beyond=3.3e-5, knee=128, kv=1.75e-7, pair=1.6e-9, seq=-2.3e-5)
    loads = steps(400)
    fitted = fit_steps(loads, [made.step_s(load) for load in loads], device="a card")
    for name in ("base", "token", "beyond", "kv", "pair", "seq", "knee"):
        assert getattr(fitted.cost, name) == pytest.approx(getattr(made, name), rel=1e-6), name
    assert fitted.mape < 1e-9
    assert fitted.cost.facts["device"] == "a card"


def test_a_jump_where_a_kernel_changes_is_found():
    """Nine sequences take half as long again as eight, as small matrix products do."""
    loads = [StepLoad(n, n, 100 * n, 0.0, n) for n in range(1, 65) for _ in range(10)]
    fitted = fit_steps(loads, [5e-3 + 1e-4 * load.num_seqs + 3e-3 * (load.num_seqs > 8) for load in loads])
    assert fitted.mape < 0.01
    for count, seconds in ((8, 5.8e-3), (9, 8.9e-3), (40, 12e-3)):
        assert fitted.cost.step_s(StepLoad(count, count, 100 * count, 0.0, count)) == pytest.approx(
            seconds, rel=0.05
        )


def test_noise_is_reported_and_averaged_out():
    made = Linear(base=5e-3, token=4e-5, kv=1e-7)
    rng, loads = random.Random(1), steps(2000)
    fitted = fit_steps(loads, [made.step_s(load) * rng.uniform(0.9, 1.1) for load in loads])
    assert 0.04 < fitted.mape < 0.06  # a tenth at most, evenly: a twentieth on average
    assert abs(fitted.sum_error) < 0.01
    assert fitted.cost.kv == pytest.approx(1e-7, rel=0.05)


def test_no_term_is_below_zero():
    """Faster with more keys: no engine is, and a simulation of one would run backwards."""
    loads = steps(300)
    fitted = fit_steps(loads, [1.0 - 1e-6 * load.kv_tokens for load in loads])
    assert fitted.cost.kv == 0.0
    assert min(fitted.cost.base, fitted.cost.token, fitted.cost.beyond, fitted.cost.pair) >= 0


def test_too_few_steps():
    with pytest.raises(InvalidArgumentError, match=r"needs 50 measured steps at least, got 3; measure"):
        fit_steps(steps(3), [1.0] * 3)


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
