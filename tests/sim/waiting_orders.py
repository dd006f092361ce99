"""Effects of the order of waiting requests on first tokens and on work: traces through the engine's own
scheduler and memory manager, under each policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from kvreclaim.plan.cost import Linear, StepLoad
from kvreclaim.schedule.budget.footprint import Footprint
from kvreclaim.schedule.cache_first import CacheFirst
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.options import ReplicaOptions
from kvreclaim.sim.request import RequestRecord, SimRequest
from kvreclaim.sim.settings import Settings
from kvreclaim.sim.traces.drawn import Arrivals, TrafficShape
from kvreclaim.sim.traces.trace import Trace

Row = dict[str, Any]

SIZE: Final = 16
SYSTEM, TEMPLATE, TEMPLATES, TAIL = 1024, 1024, 5, 128
"""Tokens of a prompt that all share, of a template behind it, how many of these, tokens of one's own."""
COLD_SHARE = 0.05
OUTPUT = 64
COPIES = 8
LPM = "lpm"
ALONE = "fcfs, no waiting"
WAYS: Final = (ALONE, "fcfs", LPM, "cache")
"""ALONE: no request waits for what others compute; in the other ways it does; lpm: the longest prefix in the
cache first, as SGLang has it, for comparison."""
ENDLESS = 1 << 60


@dataclass(frozen=True, kw_only=True)
class OrderPlan:
    """The traces, and the pool that they meet.

    requests: of each trace
    load:     work that comes, of what the machine can do if all that is shared is found
    gpu:      the card whose step times are taken, for Llama-3.1-8B
    """

    requests: int = 4000
    load: float = 1.0
    num_blocks: int = 6400
    max_num_seqs: int = 48
    max_num_batched_tokens: int = 2048
    gpu: str = "H100"
    seed: int = 0

    def settings(self, policy: str) -> Settings:
        chunk = self.max_num_batched_tokens
        return Settings(
            num_blocks=self.num_blocks,
            block_size=SIZE,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=chunk,
            footprint=Footprint(block_size=SIZE, max_chunk=chunk),
            scheduling_policy=policy,
        )


@dataclass(frozen=True, slots=True)
class OrderCase:
    """A trace, and which of its requests are cold: their first tokens are new."""

    name: str
    trace: Trace
    is_cold: Callable[[RequestRecord], bool] = field(compare=False)


def run(plan: OrderPlan) -> list[Row]:
    """Returns: a row per trace and way: prompt tokens requested and computed (after a preemption
    again), waits, and seconds to the first token of cold and warm requests, median and p99."""
    cost = ReplicaOptions(gpu=plan.gpu).cost(SIZE)
    return [
        {"trace": case.name, "way": way, **_served(plan, case, cost, way)}
        for case in cases(plan, cost)
        for way in WAYS
    ]


def _served(plan: OrderPlan, case: OrderCase, cost: Linear, way: str) -> Row:
    policy = "cache" if way in (LPM, "cache") else "fcfs"
    cluster = Cluster(plan.settings(policy), cost, follow=case.trace.follow())
    scheduler = cluster.replicas[0].scheduler
    if way == LPM:
        assert isinstance(scheduler.waiting.order, CacheFirst), "the policy cache has another order"
        scheduler.waiting.order.credit, scheduler.waiting.order.aging = ENDLESS, ENDLESS
    elif way == ALONE:
        scheduler.in_flight.least_tokens = ENDLESS
    outcome = cluster.run(case.trace.requests)
    assert not outcome.refused, f"{len(outcome.refused)} requests of {case.name} fit into no pool"
    cold = [record.ttft_s for record in outcome.records if case.is_cold(record)]
    warm = [record.ttft_s for record in outcome.records if not case.is_cold(record)]
    memory = outcome.memory[0]
    return {
        "requests": len(outcome.records),
        "num_cold": len(cold),
        "computed": memory.prefix_query_tokens - memory.prefix_hit_tokens,
        "prompt_tokens": sum(record.num_prompt for record in outcome.records),
        "waits": scheduler.in_flight.num_waits,
        "preemptions": outcome.preemptions.total(),
        "makespan_s": outcome.makespan_s,
        **_percentiles("cold", cold),
        **_percentiles("warm", warm),
    }


def _percentiles(name: str, times: Iterable[float]) -> Row:
    found = sorted(times)
    return {f"{name}_p50_s": _at(found, 0.5), f"{name}_p99_s": _at(found, 0.99)}


def _at(found: list[float], share: float) -> float:
    return found[min(len(found) - 1, int(share * len(found)))]


def cases(plan: OrderPlan, cost: Linear) -> list[OrderCase]:
    """Templates behind a system prompt, with some that share nothing; conversations; the same prompt from
    several at once."""
    return [_templates(plan, cost), _conversations(plan, cost), _copies(plan, cost)]


def _rate(plan: OrderPlan, cost: Linear, computed: float, seats: float = 32) -> float:
    """Requests a second, each of which computes so many prompt tokens, and its output beside others."""
    chunk, held = plan.max_num_batched_tokens, SYSTEM + TEMPLATE + TAIL
    fill = cost.step_s(StepLoad(chunk, 1, held, chunk * held / 2, 1)) / chunk
    step = cost.step_s(StepLoad(round(seats), round(seats), round(seats * held), 0.0, round(seats)))
    return plan.load / (computed * fill + OUTPUT * step / seats)


def _templates(plan: OrderPlan, cost: Linear) -> OrderCase:
    random, length = Random(plan.seed), SYSTEM + TEMPLATE
    mean = TAIL + COLD_SHARE * length
    times = Arrivals(_rate(plan, cost, mean), "gamma", 3.0, seed=plan.seed).times(plan.requests)
    requests, cold = [], set()
    for number, time in enumerate(times):
        if random.random() < COLD_SHARE:
            cold.add(number)
            requests.append(SimRequest(time, length + TAIL, OUTPUT))
        else:
            template = f"template {random.randrange(TEMPLATES)}"
            requests.append(SimRequest(time, length + TAIL, OUTPUT, ("system", template), SYSTEM, length))
    return OrderCase("templates", Trace(requests, knows_content=True), lambda record: record.number in cold)


def _conversations(plan: OrderPlan, cost: Linear, turns: int = 5) -> OrderCase:
    shape = TrafficShape(
        plan.requests // turns, 400, OUTPUT, turns=turns, think_s=2.0, vary=0.5, seed=plan.seed
    )
    rate = _rate(plan, cost, 600) / turns
    trace = shape.trace(Arrivals(rate, "poisson", seed=plan.seed))
    firsts = {request.session: request.num_prompt for request in trace.requests}
    return OrderCase("conversations", trace, lambda record: record.num_prompt == firsts[record.session])


def _copies(plan: OrderPlan, cost: Linear) -> OrderCase:
    length, groups = SYSTEM + TEMPLATE, plan.requests // COPIES
    rate = _rate(plan, cost, length / COPIES) / COPIES
    times = Arrivals(rate, "poisson", seed=plan.seed).times(groups)
    requests = [
        SimRequest(time, length, OUTPUT, (f"prompt {group}",), length, length)
        for group, time in enumerate(times)
        for _ in range(COPIES)
    ]
    return OrderCase(
        "eight alike", Trace(requests, knows_content=True), lambda record: not record.number % COPIES
    )


def ratios(rows: list[Row]) -> list[Row]:
    """Ratios by trace: the policy cache over fcfs (99th percentile of cold first tokens), and over lpm
    (prompt tokens computed)."""
    found = []
    for name in dict.fromkeys(row["trace"] for row in rows):
        of = {row["way"]: row for row in rows if row["trace"] == name}
        found.append(
            {
                "trace": name,
                "cold_p99_over_fcfs": of["cache"]["cold_p99_s"] / of["fcfs"]["cold_p99_s"],
                "computed_over_lpm": of["cache"]["computed"] / of[LPM]["computed"],
            }
        )
    return found
