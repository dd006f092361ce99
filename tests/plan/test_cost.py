"""The time of a step: the formula, and its file."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.cost import Linear, StepLoad, Stepped, WithExperts


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
