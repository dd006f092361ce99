"""One simulation: what it is of, and its run."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from statistics import fmean
from time import perf_counter

from kvreclaim.plan.cost import Linear, StepLoad
from kvreclaim.plan.targets import NONE, Targets
from kvreclaim.sim.cluster import Cluster, SimulationResult
from kvreclaim.sim.settings import Settings
from kvreclaim.sim.traces.trace import Trace

AXES = ("replicas", "max_num_seqs", "budget", "rate")
"""Values that a search can vary."""
NUM_SAMPLES = 300


@dataclass(frozen=True, slots=True)
class Scenario:
    """A simulated setup. price: dollars an hour of one replica; None: not known."""

    trace: Trace
    settings: Settings
    cost: Linear
    num_replicas: int = 1
    router: str = "rr"
    scrape_s: float = 0.0
    targets: Targets = NONE
    price: float | None = None

    def run(self, *, sampled: bool = False) -> tuple[SimulationResult, float]:
        """Returns: what came of it, and the seconds that it took."""
        cluster = Cluster(
            self.settings,
            self.cost,
            num_replicas=self.num_replicas,
            router=self.router,
            scrape_s=self.scrape_s,
            sample_s=max(self.trace.span_s, 1.0) / NUM_SAMPLES if sampled else None,
            follow=self.trace.follow(),
        )
        collecting = gc.isenabled()
        gc.disable()  # nothing here is cyclic but what lives to the end
        started = perf_counter()
        try:
            outcome = cluster.run(self.trace.requests)
        finally:
            if collecting:
                gc.enable()
        return outcome, perf_counter() - started

    def utilisation(self, outcome: SimulationResult) -> float:
        """Offered work over what the replicas can do: prompts in full chunks, answers in the largest batch
        that seats and pool allow at their mean length."""
        records, settings = outcome.records, self.settings
        if not records or self.trace.span_s <= 0:
            return 0.0
        chunk = settings.max_num_batched_tokens
        held = fmean(
            min(
                r.num_prompt + r.num_output / 2,
                settings.footprint_of(r.num_prompt).most_tokens or float("inf"),
            )
            for r in records
        )
        seats = max(1.0, min(settings.max_num_seqs, settings.num_blocks * settings.block_size / held))
        decode = self.cost.step_s(
            StepLoad(round(seats), round(seats), round(seats * held), 0.0, round(seats))
        )
        prefill = self.cost.step_s(StepLoad(chunk, 1, 0, chunk * held / 2, 0)) - self.cost.step_s(StepLoad())
        work = sum(
            (r.num_prompt - r.hit_tokens) / chunk * prefill + r.num_output / seats * decode for r in records
        )
        return work / (self.num_replicas * self.trace.span_s)
