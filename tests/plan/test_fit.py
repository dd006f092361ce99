"""Terms of a step's time found again in steps that they made."""

from __future__ import annotations

import random

import pytest

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.cost import Linear, StepLoad
from kvreclaim.plan.fit import fit_steps


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


def test_noise_is_told_and_averaged_out():
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
