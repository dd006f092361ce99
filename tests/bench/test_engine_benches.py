"""What all benchmarks share."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvreclaim import CompressionConfig, demo_model
from kvreclaim.bench.common import alternate
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.host_steps import PartTimer, timers
from kvreclaim.bench.plans import LosslessPlan, ServePlan, SpeedPlan, VllmPlan
from kvreclaim.cli.main import app
from kvreclaim.errors import InvalidArgumentError


def test_rounds_begin_with_another_run_each_time():
    order = []
    runs = {name: lambda name=name: order.append(name) or float(len(order)) for name in "abc"}
    results = alternate(runs, 3)
    assert "".join(order) == "abcbcacab"
    assert all(len(values) == 3 for values in results.values())


def test_timers_are_taken_off_again():
    class Owner:
        def work(self):
            return 1

    owner, clock = Owner(), PartTimer()
    with timers(clock, [(owner, "work", "part")]):
        assert owner.work() == 1
    assert clock.take()["part"] > 0
    assert "work" not in vars(owner)
    assert clock.take() == {}


WITH_ONE_LENGTH = [
    (ServePlan, {"model": demo_model(), "num_prompt": 2048}),
    (DecodePlan, {"model": demo_model(), "contexts": (2048,)}),
    (LosslessPlan, {"contexts": (2048,)}),
]


@pytest.mark.parametrize(("plan", "fields"), WITH_ONE_LENGTH)
@pytest.mark.parametrize("share", ["20%", "0.2", 0.2, "1%", "100%"])
def test_a_share_is_what_the_engine_makes_of_it(plan, fields, share) -> None:
    tokens = CompressionConfig("knorm", share).for_prompt(2048, 16).budget
    assert plan(**fields, budget=share) == plan(**fields, budget=tokens) == plan(**fields, budget=str(tokens))


def test_a_fifth_is_in_whole_blocks() -> None:
    assert ServePlan(model=demo_model(), num_prompt=2048, budget="20%").budget == 400


@pytest.mark.parametrize(
    ("plan", "fields"),
    [
        (DecodePlan, {"model": demo_model(), "contexts": (1024, 2048)}),
        (LosslessPlan, {"contexts": (1024, 2048)}),
        (VllmPlan, {"model": demo_model()}),
        (SpeedPlan, {"model": demo_model()}),
    ],
)
def test_a_share_without_one_length_is_refused(plan, fields) -> None:
    with pytest.raises(InvalidArgumentError, match="prompts do not have one length; pass a number of tokens"):
        plan(**fields, budget="20%")


def test_a_share_over_several_formats_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="in each of auto, int8; pass tokens"):
        DecodePlan(model=demo_model(), contexts=(2048,), kv_cache_dtypes=("auto", "int8"), budget="20%")


@pytest.mark.parametrize("command", ["decode", "serve", "verify", "vllm"])
@pytest.mark.parametrize("bad", ["0", "many", "1.5"])
def test_bad_budgets_are_one_sentence(command, bad) -> None:
    with pytest.raises(InvalidArgumentError) as config:
        CompressionConfig("knorm", bad)
    result = CliRunner().invoke(app, ["bench", command, "--model", str(demo_model()), "--budget", bad])
    assert result.exit_code == 2, result.output
    assert str(config.value) in result.stderr
    assert result.stderr.count("\n") == 1
