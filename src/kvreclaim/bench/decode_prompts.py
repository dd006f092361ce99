"""Time to first token of a single prompt, for the systems of the decode benchmark."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median

from kvreclaim.bench.common import Row, alternate, seconds, spread
from kvreclaim.bench.decode_plan import DecodePlan
from kvreclaim.bench.systems.base import System, random_prompts
from kvreclaim.model.loader import read_config


def vocab_size(model: Path) -> int:
    return int(read_config(model).get_text_config().vocab_size)


def time_prompt(plan: DecodePlan, length: int, systems: Mapping[str, System]) -> list[Row]:
    """Return one row for each system; prompts differ, so nothing is cached. The first round does not
    count."""
    size = vocab_size(plan.model)
    warm_up, *given = (random_prompts(1, length, size, seed) for seed in range(plan.rounds + 1))
    for system in systems.values():
        system.generate(warm_up, 1)
    turns = {name: iter(given) for name in systems}

    def timed(name: str) -> float:
        prompts = next(turns[name])
        return seconds(lambda: systems[name].generate(prompts, 1))

    elapsed = alternate({name: partial(timed, name) for name in systems}, plan.rounds)
    return [
        {
            "system": name,
            "prompt": length,
            "tokens_per_s": length / median(values),
            "first_token_s": median(values),
            "rounds": len(values),
            "spread": spread(values),
        }
        for name, values in elapsed.items()
    ]
