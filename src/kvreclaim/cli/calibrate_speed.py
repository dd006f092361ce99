"""`kvreclaim calibrate-speed`: how long steps take, for plans and simulations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kvreclaim.bench.plans import SpeedPlan
from kvreclaim.checks import require
from kvreclaim.cli.bench_options import ready
from kvreclaim.cli.config_options import ConfigOptions, with_config
from kvreclaim.cli.options import writable
from kvreclaim.options import check_options, option

if TYPE_CHECKING:
    from kvreclaim.plan.cost import Linear

TERMS = {
    "base": ("a step", 1e3, "ms"),
    "token": ("a token", 1e6, "us"),
    "beyond": ("a token beyond the knee, more", 1e6, "us"),
    "knee": ("the knee", 1.0, "tokens"),
    "kv": ("1,000 keys read", 1e9, "us"),
    "pair": ("10^6 pairs of a prompt's attention", 1e12, "us"),
    "seq": ("a sequence", 1e6, "us"),
    "compaction": ("a pass of compression", 1e3, "ms"),
}
LOG = "with --log"
HERE = "without --log"


@dataclass(frozen=True, kw_only=True)
class LogPlan:
    """The engine whose log is read: vLLM's names and defaults."""

    shape: str | None = option(None, "Model: a name or config.json, as for `kvreclaim plan --model`.")
    gpu: str | None = option(None, "Card: a name known to `kvreclaim plan`.")
    weights: str = option("auto", "Weight format, as for `kvreclaim plan`.")
    kv_cache_dtype: str = option("auto", "KV cache format.")
    num_gpu_blocks: int | None = option(None, "Number of blocks in the pool, as the log says.", low=1)
    block_size: int = option(16, "Tokens per block.", low=1)
    log_max_num_seqs: int = option(256, "Maximum number of sequences in one step.", low=1)
    max_num_batched_tokens: int = option(2048, "Maximum number of tokens in one step.", low=1)
    share: float = option(1.0, "Share of the log to use, from its start.", low=0.0, high=1.0)

    def __post_init__(self) -> None:
        check_options(self)


@with_config
def calibrate_speed(
    here: Annotated[dict[str, Any], ConfigOptions(config=SpeedPlan, panel=HERE, unset=True, build=dict)],
    logged: Annotated[dict[str, Any], ConfigOptions(config=LogPlan, panel=LOG, unset=True, build=dict)],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Write the step times to this JSON file.", callback=writable),
    ],
    log: Annotated[
        Path | None,
        typer.Option(
            help="Fit to requests that vLLM served: a file of `vllm bench serve --save-result "
            "--save-detailed`, or JSON lines."
        ),
    ] = None,
) -> None:
    """Measure how long engine steps take on this machine, or fit them to a vLLM log."""
    useless = here if log is not None else logged
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in useless)
    how = "cannot be given with --log FILE" if log is not None else "can be given with --log FILE only"
    require(not useless, f"{flags} {how}; leave it out.")
    cost, error = _from_engine(SpeedPlan(**here)) if log is None else _from_log(log, LogPlan(**logged))
    cost.save(output)
    console = Console()
    table = Table("term", "time", title=str(cost.facts["kind"]))
    for name, (words, scale, unit) in TERMS.items():
        table.add_row(words, f"{getattr(cost, name) * scale:,.4g} {unit}")
    console.print(table)
    console.print(error)
    console.print(f"[green]{output}[/green]: for `kvreclaim simulate --calibration`")


def _from_engine(plan: SpeedPlan) -> tuple[Linear, str]:
    with ready(plan.threads):
        from kvreclaim.bench.step_times import calibrate, engine_of

        found = calibrate(plan, engine_of(plan))
    return found.cost, (
        f"{found.num_steps} steps; of a fifth held out, a step's time is off by {found.mape:.1%} on average, "
        f"their sum by {found.sum_error:+.1%}"
    )


def _from_log(log: Path, given: LogPlan) -> tuple[Linear, str]:
    from kvreclaim.plan.cards import find_card
    from kvreclaim.schedule import Footprint
    from kvreclaim.sim.fit_log import fit_log, read_log
    from kvreclaim.sim.options import ReplicaOptions
    from kvreclaim.sim.settings import Settings

    lacking = [name for name in ("shape", "gpu", "num_gpu_blocks") if getattr(given, name) is None]
    flags = ", ".join(f"--{name.replace('_', '-')}" for name in lacking)
    require(not lacking, f"--log needs to know the engine that wrote it; add {flags}.")
    assert given.shape is not None
    assert given.gpu is not None
    assert given.num_gpu_blocks is not None
    engine = ReplicaOptions(
        model=given.shape, gpu=given.gpu, weights=given.weights, kv_cache_dtype=given.kv_cache_dtype
    )
    start = engine.cost(given.block_size)
    settings = Settings(
        num_blocks=given.num_gpu_blocks,
        block_size=given.block_size,
        max_num_seqs=given.log_max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
        footprint=Footprint(block_size=given.block_size, max_chunk=given.max_num_batched_tokens),
    )
    facts = {
        "kind": "a log of requests",
        "model": engine.shape.name,
        "device": find_card(given.gpu).name,
        "share_of_log": given.share,
    }
    found = fit_log(read_log(log), settings, start, given.share, **facts)
    factors = ", ".join(f"{name} x {factor:.2f}" for name, factor in found.factors.items())
    return found.cost, (
        f"{found.num_times} first and last tokens; simulated, they are off by {found.error:.1%} on average. "
        f"Beside the data sheet: {factors}"
    )
