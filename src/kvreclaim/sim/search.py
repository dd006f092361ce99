"""Search for the smallest or largest setting that meets the targets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from kvreclaim.checks import check_choice, require
from kvreclaim.plan.cost import StepLoad
from kvreclaim.sim.report import distribution
from kvreclaim.sim.request import SimRequest
from kvreclaim.sim.scenario import AXES, Scenario

PREEMPTED = 0.01
"""Maximum share of preempted requests in a search for max_num_seqs."""
MOST_SPEED = 1024.0
PRECISION = 1.02


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """One value and its latencies. why: the first target that was missed; empty: none."""

    value: float
    why: str
    p99: dict[str, float | None]

    def row(self) -> dict[str, Any]:
        return {"value": self.value, "kept": not self.why, "why_not": self.why, **self.p99}


class Search:
    """Bisects one axis. It assumes that targets are monotonic along it, which holds except near the border,
    where scheduling is irregular. `tried` has all values."""

    def __init__(self, scenario: Scenario, axis: str) -> None:
        check_choice("search", axis, AXES)
        self.scenario, self.axis = scenario, axis
        self.tried: list[SearchPoint] = []
        self.why_none = ""
        if axis != "max_num_seqs":
            require(
                bool(scenario.targets), f"--search {axis} needs targets: add --slo ttft=2s,tpot=60ms.", "slo"
            )
        if axis == "budget":
            require(
                scenario.settings.footprint.bounded and scenario.settings.by_prompt is None,
                "--search budget needs a policy with a budget in tokens: add --compression "
                "triattention:budget=1024.",
                "compression",
            )

    def run(self) -> dict[str, Any]:
        """Returns: the best value, None if no value meets the targets, and all values tried."""
        found = {
            "replicas": self._replicas,
            "rate": self._rate,
            "max_num_seqs": self._seats,
            "budget": self._budget,
        }[self.axis]()
        if found is None and self.tried:
            self.why_none = self.tried[-1].why
        tried = [each.row() for each in self.tried]
        return {"axis": self.axis, "best": found, "why_none": self.why_none, "tried": tried}

    def _replicas(self) -> int | None:
        """Fewest."""
        self.why_none = self.why_never() or ""
        if self.why_none:
            return None
        count = 1
        while not self._keeps(count):
            count *= 2
            if count > 2 * max(1, len(self.scenario.trace.requests)):
                return None
        return self._least(count // 2, count)

    def why_never(self) -> str | None:
        """Return why no number of replicas is enough: more than 1 of 100 requests would miss a target even
        alone. The time to first token counts only without prefix hits."""
        scenario = self.scenario
        targets, requests = scenario.targets, scenario.trace.requests
        for name, most, least in (
            ("tpot", targets.tpot_s, self._least_tpot_s),
            ("ttft", None if scenario.trace.knows_content else targets.ttft_s, self._least_ttft_s),
        ):
            if most is None:
                continue
            times = sorted(map(least, requests))
            if sum(time > most for time in times) > PREEMPTED * len(times):
                return (
                    f"{name} above {most:g} s whatever the number of replicas: alone on one, half of the "
                    f"requests take {times[len(times) // 2]:.3g} s or more, and the least {times[0]:.3g} s"
                )
        return None

    def _least_tpot_s(self, request: SimRequest) -> float:
        """Seconds of a step that decodes this request alone."""
        keys = min(
            request.num_prompt,
            self.scenario.settings.footprint_of(request.num_prompt).budget or request.num_prompt,
        )
        return self.scenario.cost.step_s(StepLoad(1, 1, keys, 0.0, 1)) if request.num_output > 1 else 0.0

    def _least_ttft_s(self, request: SimRequest) -> float:
        """Seconds to compute its prompt in whole chunks."""
        cost, chunk = self.scenario.cost, self.scenario.settings.max_num_batched_tokens
        whole, rest = divmod(request.num_prompt, chunk)
        seconds = whole * cost.step_s(StepLoad(chunk, 1))
        return seconds + (cost.step_s(StepLoad(rest, 1)) if rest else 0.0)

    def _least(self, fails: int, keeps: int) -> int:
        while keeps - fails > 1:
            middle = (fails + keeps) // 2
            fails, keeps = (fails, middle) if self._keeps(middle) else (middle, keeps)
        return keeps

    def _rate(self) -> float | None:
        """Most, as a multiple of the trace's."""
        speed = 1.0
        if self._keeps(speed):
            while speed < MOST_SPEED and self._keeps(speed * 2):
                speed *= 2
            low, high = speed, speed * 2
        else:
            while speed > 1 / MOST_SPEED and not self._keeps(speed / 2):
                speed /= 2
            if speed <= 1 / MOST_SPEED:
                return None
            low, high = speed / 2, speed
        while high / low > PRECISION:
            middle = (low * high) ** 0.5
            low, high = (middle, high) if self._keeps(middle) else (low, middle)
        return low

    def _seats(self) -> int | None:
        """Most, up to what the scenario has."""
        return self._most(1, self.scenario.settings.max_num_seqs)

    def _budget(self) -> int | None:
        """Most, in blocks, up to the longest sequence."""
        size, trace = self.scenario.settings.block_size, self.scenario.trace
        longest = max(request.num_prompt + request.num_output for request in trace.requests)
        least = max(1, -(-self.scenario.settings.footprint.least_budget // size))
        found = self._most(least, max(least, longest // size), lambda blocks: blocks * size)
        return None if found is None else found * size

    def _most(self, low: int, high: int, value: Callable[[int], int] = int) -> int | None:
        if self._keeps(value(high)):
            return high
        if high == low or not self._keeps(value(low)):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._keeps(value(middle)) else (low, middle)
        return low

    def _keeps(self, value: float) -> bool:
        scenario = self._with(value)
        outcome, _ = scenario.run()
        records, targets = outcome.records, scenario.targets
        p99: dict[str, float | None] = {}
        why = f"{len(outcome.refused)} requests fit into no pool" if outcome.refused else ""
        for name, most in (("ttft", targets.ttft_s), ("tpot", targets.tpot_s), ("e2e", targets.e2e_s)):
            times = (getattr(record, f"{name}_s") for record in records)
            found = distribution(time for time in times if time is not None).get("p99")
            p99[f"{name}_p99_s"] = found
            if most is not None and found is not None and found > most:
                why = why or f"{name} p99 is {found:.3g} s, above {most:g} s"
        preempted = sum(record.preemptions > 0 for record in records)
        if self.axis == "max_num_seqs" and preempted > PREEMPTED * len(records):
            why = why or f"{preempted} of {len(records)} requests are preempted"
        self.tried.append(SearchPoint(value, why, p99))
        return not why

    def _with(self, value: float) -> Scenario:
        scenario, settings = self.scenario, self.scenario.settings
        if self.axis == "replicas":
            return replace(scenario, num_replicas=int(value))
        if self.axis == "rate":
            return replace(scenario, trace=scenario.trace.sped(value))
        if self.axis == "max_num_seqs":
            return replace(scenario, settings=replace(settings, max_num_seqs=int(value)))
        footprint = replace(settings.footprint, budget=int(value))
        return replace(scenario, settings=replace(settings, footprint=footprint))
