"""Many replicas, routers, what they know, tiers, figures, searches."""

from __future__ import annotations

from dataclasses import replace

import pytest
from random_loads import simulate

from kvreclaim.errors import InvalidArgumentError
from kvreclaim.plan.answer import plan
from kvreclaim.plan.cost import Linear
from kvreclaim.plan.plan_request import PlanRequest
from kvreclaim.plan.targets import parse_targets
from kvreclaim.schedule import EvictionMethod, Footprint
from kvreclaim.schedule.rates import Rates
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.options import ReplicaOptions, Serving
from kvreclaim.sim.report import report
from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.routers import PrefixAware
from kvreclaim.sim.scenario import Scenario
from kvreclaim.sim.search import Search
from kvreclaim.sim.settings import Settings
from kvreclaim.sim.traces.drawn import Arrivals, TrafficShape

ROOMY = Settings(1000, 16, footprint=Footprint())


def test_one_request_by_hand() -> None:
    """Two chunks of a prompt, then decode steps that read one key more each."""
    cost = Linear(base=1.0, token=0.01, kv=0.001, seq=0.1, pair=0.0001)
    settings = replace(ROOMY, max_num_batched_tokens=64, footprint=Footprint(max_chunk=64))
    [record] = simulate_at(cost, settings, [SimRequest(5.0, 100, 3)])
    chunks = [1.1 + 0.64 + 64 * 32 * 1e-4, 1.1 + 0.36 + 36 * (64 + 18) * 1e-4]
    assert record.ttft_s == pytest.approx(sum(chunks))
    decode = [1.1 + 0.01 + 0.101, 1.1 + 0.01 + 0.102]
    assert record.e2e_s == pytest.approx(sum(chunks) + sum(decode))
    assert record.tpot_s == pytest.approx(sum(decode) / 2)


def simulate_at(cost, settings, requests):
    return Cluster(settings, cost).run(requests).records


def test_a_thousand_replicas() -> None:
    requests = [SimRequest(i * 0.001, 20, 5) for i in range(3000)]
    for router in ("rr", "least", "prefix"):
        outcome = simulate(ROOMY, requests, num_replicas=1000, router=router, scrape_s=0.05)
        assert len(outcome.records) == 3000
        assert all(record.end_s is not None for record in outcome.records)
    assert {record.replica for record in simulate(ROOMY, requests, num_replicas=1000).records} == set(
        range(1000)
    )


def test_least_loaded_spares_the_replica_that_is_busy() -> None:
    long, short = SimRequest(0.0, 50, 400), [SimRequest(0.1 + i * 0.4, 50, 2) for i in range(8)]
    outcome = simulate(ROOMY, [long, *short], num_replicas=2, router="least")
    assert {record.replica for record in outcome.records[1:]} == {1 - outcome.records[0].replica}


def test_a_router_that_looks_seldom_does_not_know_who_has_ended() -> None:
    requests = [SimRequest(i * 1.0, 30, 2) for i in range(6)]
    now = simulate(ROOMY, requests, num_replicas=2, router="least").records
    seldom = simulate(ROOMY, requests, num_replicas=2, router="least", scrape_s=100.0).records
    assert [record.replica for record in now] == [0] * 6
    assert [record.replica for record in seldom] == [0, 1] * 3


def test_prefix_aware_finds_more() -> None:
    requests = [
        SimRequest(i * 0.5, 512 * 3 + 5, 3, (i % 5, 100 + i % 5, 200 + i % 5), 512, 1536) for i in range(40)
    ]
    hits = {
        name: sum(r.hit_tokens for r in simulate(ROOMY, requests, num_replicas=4, router=name).records)
        for name in ("rr", "prefix")
    }
    assert hits["prefix"] == 35 * 1536
    assert hits["prefix"] > hits["rr"]


def test_prefix_aware_keeps_a_conversation_where_it_began() -> None:
    trace = TrafficShape(12, prompt=90, output=20, prefix=64, turns=4, think_s=3.0).trace(Arrivals(0.4))
    homes: dict[str, dict[object, set[int]]] = {}
    for router in ("rr", "prefix"):
        found = homes[router] = {}
        for record in simulate(
            ROOMY, trace.requests, num_replicas=3, router=router, follow=trace.follow()
        ).records:
            found.setdefault(record.session, set()).add(record.replica)
        assert len(found) == 12
    assert all(len(home) == 1 for home in homes["prefix"].values())
    assert any(len(home) > 1 for home in homes["rr"].values())


def test_a_prefix_router_remembers_as_much_as_a_replica_holds() -> None:
    router = PrefixAware(2, 4)
    assert router.choose([1, 2, 3]) == 0
    router.loads[0] = 1
    assert router.choose([1, 2, 3]) == 0
    assert router.choose([4, 5, 6]) == 1
    assert router.choose([10, 11, 12]) == 1
    router.loads[1] = 1
    assert router.choose([4, 5, 6]) == 0, "forgotten: the least loaded, the first of two"


def test_swapping_keeps_what_recomputing_loses() -> None:
    requests = [SimRequest(0.0, 60, 100) for _ in range(6)]
    tight = Settings(30, 16, footprint=Footprint(), host_blocks=200, bytes_per_block=1000, rates=Rates())
    runs = {
        mode: simulate(replace(tight, preemption_mode=mode, enable_prefix_caching=False), requests)
        for mode in ("swap", "recompute")
    }
    assert sum(record.swaps for record in runs["swap"].records) > 0
    assert sum(record.recomputed_tokens for record in runs["swap"].records) == 0
    assert sum(record.recomputed_tokens for record in runs["recompute"].records) > 100
    assert sum(record.preemptions for record in runs["swap"].records) > 0


def test_the_host_finds_what_the_pool_has_lost() -> None:
    requests = [SimRequest(i * 5.0, 165, 2, (i % 4,), 160, 160) for i in range(12)]
    small = Settings(14, 16, footprint=Footprint())
    lost, kept = (simulate(replace(small, host_blocks=n), requests) for n in (0, 100))
    assert sum(record.hit_tokens for record in lost.records) == 0
    assert sum(record.loaded_tokens for record in kept.records) == 8 * 160


def test_important_ones_run_first() -> None:
    requests = [SimRequest(0.0, 30, 20, priority=i % 2) for i in range(8)]
    alone = replace(ROOMY, max_num_seqs=1, scheduling_policy="priority")
    records = simulate(alone, requests).records
    assert max(r.end_s for r in records[::2]) <= min(r.scheduled_s for r in records[1::2])


def test_a_request_that_fits_nowhere_is_refused() -> None:
    tight = Settings(10, 16, footprint=Footprint())
    outcome = simulate(tight, [SimRequest(0.0, 300, 5), SimRequest(0.0, 30, 5), SimRequest(0.0, 30, 500)])
    assert [(request.num_prompt, request.num_output) for request in outcome.refused] == [(300, 5), (30, 500)]
    assert [record.num_output for record in outcome.records] == [5]


def test_a_length_that_the_pool_cannot_hold_is_refused_as_the_engine_does() -> None:
    machine = ReplicaOptions(model="Llama-3.1-8B", gpu="4090", num_blocks=10)
    cost = machine.cost(16)
    assert Serving(max_model_len=160).settings(machine, cost).max_model_len == 160
    with pytest.raises(InvalidArgumentError, match=r"max_model_len is 161, .* holds 160 tokens") as refused:
        Serving(max_model_len=161).settings(machine, cost)
    assert refused.value.field == "max_model_len"
    with pytest.raises(InvalidArgumentError, match="was made for 131072 positions"):
        Serving(max_model_len=131_073).settings(machine, cost)
    assert Serving().settings(machine, cost).max_model_len == 131_072


def test_block_policies_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="drops whole blocks"):
        Settings(10, footprint=Footprint(EvictionMethod.BLOCKS, budget=64))


def scenario(**fields) -> Scenario:
    trace = TrafficShape(200, 400, 50, prefix=64).trace(Arrivals(2.0))
    cost = Linear(0.02, beyond=2e-4, kv=1e-7, compaction=1e-4, move=1e-5)
    return Scenario(trace, ROOMY, cost, **fields)


def test_figures() -> None:
    found = report(scenario(targets=parse_targets("ttft=300ms,tpot=1s"), price=3.6, num_replicas=2))
    assert found["requests"] == 200
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        assert list(found[name]) == ["mean", "p50", "p90", "p99"]
        assert found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"]
    assert found["hit_tokens"] + sum(found["misses"].values()) == found["prompt_tokens"] == 200 * 464
    assert found["hit_rate"] == found["hit_tokens"] / found["prompt_tokens"]
    assert found["hit_tokens"] == 198 * 64
    spent = found["simulated_s"] / 3600 * 7.2
    assert found["money"]["per_million_output_tokens"] == pytest.approx(spent / (200 * 50) * 1e6)
    kept = found["goodput"]["share"] * 200
    assert found["goodput"]["requests_per_s"] == pytest.approx(kept / found["simulated_s"])
    assert 0 < kept <= 200
    lines = found["timeline"]
    assert max(lines["blocks"]) <= 2 * found["num_blocks"]
    assert {len(line) for line in lines.values()} == {len(lines["at_s"])}
    assert 100 < len(lines["at_s"]) <= 400


def test_bands_where_the_load_is_near_capacity() -> None:
    calm, busy = (report(replace(scenario(), trace=scenario().trace.sped(x))) for x in (0.2, 6.0))
    assert calm["bands"] is None
    assert calm["utilisation"] < 0.9 < busy["utilisation"]
    for name in ("ttft_s", "tpot_s", "e2e_s"):
        low, high = busy["bands"][name]["p99"]
        assert low < high
        assert low <= busy[name]["p99"] <= high


def test_search_finds_the_border() -> None:
    case = scenario(targets=parse_targets("ttft=400ms"))
    case = replace(case, trace=case.trace.sped(8.0))
    found = Search(case, "replicas").run()
    tried = {row["value"]: row["kept"] for row in found["tried"]}
    assert found["best"] > 1
    assert tried[found["best"]]
    assert not tried[found["best"] - 1]


def test_search_says_why_nothing_is_enough() -> None:
    found = Search(scenario(targets=parse_targets("tpot=10ms")), "replicas").run()
    assert found["best"] is None
    assert "whatever the number of replicas" in found["why_none"]
    assert found["tried"] == []


def test_search_for_rate_seats_and_budget() -> None:
    slow = scenario(targets=parse_targets("ttft=400ms"))
    rate = Search(slow, "rate").run()
    kept = [row["value"] for row in rate["tried"] if row["kept"]]
    lost = [row["value"] for row in rate["tried"] if not row["kept"]]
    assert rate["best"] == max(kept)
    assert min(lost) / rate["best"] < 1.03
    pressed = replace(slow, settings=replace(ROOMY, num_blocks=120, max_num_seqs=64))
    long = TrafficShape(60, 60, 400).trace(Arrivals(20.0))
    pressed = replace(pressed, trace=long, targets=parse_targets(None))
    seats = Search(pressed, "max_num_seqs").run()
    tried = {row["value"]: row["kept"] for row in seats["tried"]}
    assert tried[seats["best"]]
    assert not tried[seats["best"] + 1]
    compact = Footprint(EvictionMethod.COMPACT, budget=64, interval=32)
    budgets = replace(pressed, settings=replace(pressed.settings, footprint=compact))
    budgets = replace(budgets, targets=parse_targets("e2e=20s"))
    budget = Search(budgets, "budget").run()
    assert budget["best"] is None or budget["best"] % 16 == 0


def test_the_pool_is_that_of_the_plan() -> None:
    machine_options = {"gpu": "4090", "kv_cache_dtype": "int4"}
    planned = plan("Llama-3.1-8B", PlanRequest(context=4096, **machine_options)).values
    machine, serving = ReplicaOptions(model="Llama-3.1-8B", **machine_options), Serving()
    settings = serving.settings(machine, machine.cost(16))
    assert settings.num_blocks == planned["pool_blocks"]
