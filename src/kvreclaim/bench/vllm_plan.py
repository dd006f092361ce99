"""What `kvreclaim bench vllm` measures: known, and checked, without torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvreclaim.bench.plans import THREADS, VLLM_PYTHON, ModelPlan
from kvreclaim.checks import check_choice, require
from kvreclaim.options import option

VLLM_CASES = ("small", "large", "cost", "serve")
OBJECTIVES = ("ttft", "tpot", "e2el")
PROMPTS = ("random", "text")


@dataclass(frozen=True, kw_only=True)
class VllmPlan(ModelPlan):
    """vLLM with and without the plugin. stats: of the model's queries; None takes its own file."""

    cases: tuple[str, ...] = option(VLLM_CASES, "small, large, cost, serve; comma-separated.")
    policy: str = option("query_mixture", "Of the side with the plugin.")
    interval: int = option(128, "Tokens.", low=1, unit=" token")
    stats: Path | None = option(None, "Query statistics; the model's own where none.")
    python: Path = option(Path(".vllm-env/bin/python"), VLLM_PYTHON, flags=("--vllm-python",))
    starts: int = option(3, "Of the processes of `cost`.", low=1)
    rounds: int = option(24, "Of `cost`, in each start, after one that is not counted.", low=1)
    threads: int = option(1, THREADS, low=1, high=1024)
    plot: Path | None = option(None, "Write the pool over time to this image.")
    rate: float = option(4.0, "Of `serve`, requests that come per second.", low=0.001, high=1000.0)
    turns: int = option(2, "Of `serve`, for each side.", low=1)
    prompts: str = option("random", "Of `serve`: random tokens, or text.", choices=PROMPTS)
    goodput: tuple[str, ...] = option(
        ("ttft:10000", "tpot:200"),
        "Of `serve`, what a good answer keeps to: ttft:MS, tpot:MS, e2el:MS; comma-separated.",
    )
    seed: int = option(0, "Of `serve`'s first turn; the next one has the next.", low=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.cases:
            check_choice("--cases", name, VLLM_CASES)
        for objective in self.goodput:
            name, _, limit = objective.partition(":")
            require(
                name in OBJECTIVES and limit.isdecimal() and int(limit) > 0,
                f"--goodput has {objective!r}; pass {', '.join(OBJECTIVES)} with milliseconds behind a "
                "colon, such as ttft:10000,tpot:200.",
            )
