"""Orders of waiting requests on drawn traces, and that the policy cache keeps its promises there."""

from __future__ import annotations

from functools import cache

from waiting_orders import ALONE, COPIES, LPM, WAYS, OrderPlan, cases, ratios, run

from kvreclaim.sim.options import ReplicaOptions

PLAN = OrderPlan(requests=1600, load=1.1)


@cache
def rows() -> tuple[dict, ...]:
    return tuple(run(PLAN))


def of(trace: str, way: str) -> dict:
    (found,) = (row for row in rows() if (row["trace"], row["way"]) == (trace, way))
    return found


def test_no_cold_request_waits_much_longer_and_hardly_more_is_computed() -> None:
    found = ratios(list(rows()))
    assert [row["trace"] for row in found] == ["templates", "conversations", "eight alike"]
    for row in found:
        assert row["cold_p99_over_fcfs"] <= 1.2, row
        assert row["computed_over_lpm"] <= 1.05, row


def test_longest_prefix_first_starves_the_cold_ones() -> None:
    """An order without aging misses the bound of the test above."""
    assert of("templates", LPM)["cold_p99_s"] > 1.5 * of("templates", "fcfs")["cold_p99_s"]


def test_what_is_computed_for_another_is_not_computed_again() -> None:
    alone, waits = of("eight alike", ALONE), of("eight alike", "fcfs")
    assert (alone["waits"], waits["waits"] > 0) == (0, True)
    assert waits["computed"] < alone["computed"]
    groups = PLAN.requests // COPIES
    least = groups * (2048 + (COPIES - 1) * 16)
    least_shared = 64  # what an owner has left is computed by all, where it is less
    most = groups * (2048 + (COPIES - 1) * (16 + least_shared))
    assert least <= waits["computed"] <= most


def test_each_way_serves_the_same_prompts() -> None:
    for trace in ("templates", "conversations", "eight alike"):
        found = [of(trace, way) for way in WAYS]
        assert len({row["prompt_tokens"] for row in found}) == 1
        assert len({(row["requests"], row["num_cold"]) for row in found}) == 1
        assert 0 < found[0]["num_cold"] < found[0]["requests"]


def test_the_same_seed_gives_the_same_figures() -> None:
    plan = OrderPlan(requests=100, seed=5)
    assert run(plan) == run(plan)
    assert run(plan) != run(OrderPlan(requests=100, seed=6))


def test_cold_ones_share_nothing() -> None:
    case = cases(PLAN, ReplicaOptions(gpu="H100").cost(16))[0]
    assert all(request.num_prompt == 2176 for request in case.trace.requests)
    assert 0.03 < sum(not request.ids for request in case.trace.requests) / PLAN.requests < 0.07
