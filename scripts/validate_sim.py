"""Compare requests served by this machine's engine in real time with their simulation.

In turns a random load is measured, to which the engine's step time is fitted, and other requests come at
their times, at several rates: a machine is not equally fast all the time. Exits with 1 where a mean is off by
more than --most.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table

from kvreclaim.bench.common import machine
from kvreclaim.bench.plans import SpeedPlan
from kvreclaim.bench.step_times import (
    ServedRequest,
    Timed,
    Watched,
    draw,
    engine_of,
    fit,
    observe,
    replay,
)
from kvreclaim.engine.api.llm import LLM
from kvreclaim.plan.cost import Linear
from kvreclaim.schedule import Footprint
from kvreclaim.sim.cluster import Cluster
from kvreclaim.sim.request import RequestRecord, SimRequest
from kvreclaim.sim.settings import Settings

MEANS = ("ttft_s", "e2e_s", "tpot_s")


def requests(count: int, rate: float, longest: int, seed: int) -> list[Timed]:
    """Poisson arrivals, lengths evenly over their logarithm."""
    rng, at_s, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(Timed(at_s, draw(rng, 8, longest), draw(rng, 8, longest)))
        at_s += rng.expovariate(rate)
    return found


def simulated(llm: LLM, cost: Linear, asked: Sequence[Timed]) -> list[RequestRecord]:
    config = llm.engine.config
    chunk, size = config.max_num_batched_tokens, config.block_size
    settings = Settings(
        num_blocks=llm.engine.memory.pool.num_blocks,
        block_size=size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=chunk,
        max_model_len=llm.engine.max_model_len,
        footprint=Footprint(block_size=size, max_chunk=chunk),
        enable_prefix_caching=False,
    )
    given = [SimRequest(each.arrival_s, each.num_prompt, each.num_output) for each in asked]
    return Cluster(settings, cost).run(given).records


def means(asked: Sequence[Timed], served: Sequence[ServedRequest]) -> dict[str, float]:
    both = list(zip(asked, served, strict=True))
    gaps = [(b.end_s - b.first_token_s) / (a.num_output - 1) for a, b in both if a.num_output > 1]
    return {
        "ttft_s": fmean(b.first_token_s - a.arrival_s for a, b in both),
        "e2e_s": fmean(b.end_s - a.arrival_s for a, b in both),
        "tpot_s": fmean(gaps),
    }


def means_of(records: Sequence[RequestRecord]) -> dict[str, float]:
    values = {name: [getattr(each, name) for each in records] for name in MEANS}
    return {name: fmean(value for value in found if value is not None) for name, found in values.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("bench_models/qwen3-26m"))
    parser.add_argument("--seconds", type=float, default=60.0, help="of the load that is fitted")
    parser.add_argument("--rates", default="3,6,12", help="requests a second")
    parser.add_argument("--requests", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3, help="each of all rates")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--most", type=float, default=0.10)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    plan = SpeedPlan(model=given.model, seconds=given.seconds, threads=given.threads)
    llm = engine_of(plan)
    rates = [float(rate) for rate in given.rates.split(",")]
    seen, served = Watched(), {}
    for turn in range(given.rounds):
        seen.extend(observe(plan, llm, plan.seconds / given.rounds, seed=turn))
        for rate in rates:
            asked = requests(given.requests, rate, plan.longest, seed=turn)
            served[rate, turn] = asked, means(asked, replay(llm, asked, random.Random(turn)))
    fitted = fit(plan, llm, seen)
    console, table = Console(), Table("requests/s", "", "engine", "simulated", "off by", "in each round")
    console.print(f"{fitted.num_steps} steps, off by {fitted.mape:.1%} each, {fitted.sum_error:+.1%} in all")
    rows = []
    for rate in rates:
        runs = [served[rate, turn] for turn in range(given.rounds)]
        pairs = [(real, means_of(simulated(llm, fitted.cost, asked))) for asked, real in runs]
        for name in MEANS:
            real_s, made_s = (fmean(pair[side][name] for pair in pairs) for side in (0, 1))
            each = [made[name] / real[name] - 1 for real, made in pairs]
            row = {"rate": rate, "mean": name, "engine": real_s, "simulated": made_s}
            rows.append({**row, "error": made_s / real_s - 1, "rounds": each})
            told = " ".join(f"{error:+.1%}" for error in each)
            figures = (f"{real_s:.4f}", f"{made_s:.4f}", f"{made_s / real_s - 1:+.1%}")
            table.add_row(f"{rate:g}", name, *figures, told)
    console.print(table)
    if given.json is not None:
        facts = {"machine": machine(), "fit": dict(fitted.cost.facts), "rows": rows}
        given.json.write_text(json.dumps(facts, indent=1) + "\n")
    worst = max(abs(row["error"]) for row in rows)
    console.print(f"largest error {worst:.1%} (asked: {given.most:.0%})")
    raise SystemExit(worst > given.most)


if __name__ == "__main__":
    main()
