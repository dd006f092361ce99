"""vLLM with and without the plugin: `vllm serve` with equal pools, and vLLM's own client against each.

The sides take turns. Each turn has another seed, and all sides get the same prompts, lengths and arrivals.
Ends of text are ignored, so all generate equally many tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

from matplotlib.figure import Figure
from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems.server_process import VLLM_BLOCK_SIZE, Gauges, VllmServer
from kvreclaim.bench.systems.worker_process import compression_option, link_model
from kvreclaim.bench.vllm_loads import LOADS, LOOKUPS, Prompts, ServeLoad, judged, make_prompts
from kvreclaim.checks import require
from kvreclaim.compression_settings import AUTO
from kvreclaim.outputs import writing

WITHOUT, CODED, WITH = "vLLM", "vLLM, fp8", "vLLM + kvreclaim"
COLORS = {WITHOUT: "#d62728", CODED: "#1f77b4", WITH: "#2ca02c"}
USAGE, RUNNING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running"
COUNTERS = {
    "steps": "vllm:iteration_tokens_total_count",
    "preemptions": "vllm:num_preemptions_total",
    "blocks_freed": "kvreclaim_blocks_freed_total",
    "passes": "kvreclaim_compactions_total",
    "pass_s": "kvreclaim_compression_seconds_total",
}
LATENCIES = ("ttft", "tpot", "itl", "e2el")
FIGURES = (
    *("completed", "output_throughput", "request_goodput", "duration", *COUNTERS),
    *("mean_blocks", "peak_blocks", "mean_running", "max_running"),
    *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("median", "p99")),
)
COMPARED = {
    "speed": "output_throughput",
    "goodput": "request_goodput",
    "steps": "steps",
    "itl": "median_itl_ms",
    "p99_itl": "p99_itl_ms",
}
"""Name of a ratio -> its figure."""


def run(plan: VllmPlan, case: str, console: Console) -> list[Row]:
    """Serve the case's load on all sides in turns. Returns: a row of each, with `turns` after the medians.

    Raises: SkipPoint if vLLM fails; InvalidArgumentError if the plugin is not installed; RuntimeError if
    the sides did not do the same work, or not under the case's circumstances.
    """
    load = LOOKUPS if plan.prompts == "lookups" and case == "serve" else LOADS[case]
    budget = load.budget or plan.budget
    loads = _loads(plan, load)
    with _serving(plan, loads, budget, console) as (servers, prompts):
        seeds = {name: enumerate(prompts, plan.seed) for name in servers}

        def turn(name: str) -> Row:
            return _turn(plan, loads[name], servers[name], console, *next(seeds[name]))

        found = alternate({name: partial(turn, name) for name in servers}, plan.turns)
    for name in servers:
        _check(load, found[WITHOUT], found[name], compresses=name == WITH)
    return [_row(plan, own, name, found, {"case": case, "budget": budget}) for name, own in loads.items()]


def _loads(plan: VllmPlan, load: ServeLoad) -> dict[str, ServeLoad]:
    """Return each side's: in fp8 the same bytes hold twice as many blocks, beside vLLM's null block."""
    if plan.kv_cache_dtype == AUTO:
        return {WITHOUT: load, WITH: load}
    coded = replace(load, num_blocks=2 * load.num_blocks - 1)
    return {WITHOUT: load, CODED: coded, WITH: coded}


def _check(load: ServeLoad, without: Sequence[Row], others: Sequence[Row], *, compresses: bool) -> None:
    """Raises: RuntimeError."""
    for plain, other in zip(without, others, strict=True):
        wrong = {
            "the sides answered different numbers of tokens": plain["total_output_tokens"]
            != other["total_output_tokens"],
            "a request was preempted": load.is_ample and plain["preemptions"] + other["preemptions"] > 0,
            "the plugin has not compressed": compresses and not other["passes"],
            "passes ran without the plugin": not compresses and other["passes"] > 0,
        }
        for what, holds in wrong.items():
            if holds:
                raise RuntimeError(f"in the turn with seed {plain['seed']} {what}")


@contextmanager
def _serving(
    plan: VllmPlan, loads: Mapping[str, ServeLoad], budget: int, console: Console
) -> Iterator[tuple[dict[str, VllmServer], list[Prompts]]]:
    """Start and warm up the servers, and make the prompts of each turn."""
    settings: Row = {"policy": plan.policy, "budget": budget, "interval": plan.interval}
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="served-") as folder:
        model = Path(folder, "model")
        link_model(plan.model, model)
        coded = {} if plan.kv_cache_dtype == AUTO else {"kv-cache-dtype": plan.kv_cache_dtype}
        ours: Row = {"kv_compression": compression_option(plan.model, plan.stats, **settings)}
        ours |= {"centred_keys": True} if coded else {}
        sides = {WITHOUT: {}, CODED: coded, WITH: coded | {"additional-config": json.dumps(ours)}}
        servers = {
            name: stack.enter_context(closing(_server(plan, load, model, sides[name])))
            for name, load in loads.items()
        }
        for server in servers.values():
            server.wait()
        require(
            COUNTERS["passes"] in servers[WITH].metrics(),
            f"{str(plan.python)!r} does not load kvreclaim's plugin; run `make vllm-env`, which installs it "
            "there.",
        )
        prompts = make_prompts(plan, loads[WITHOUT], model, Path(folder))
        warm = ServeLoad(requests=1, prompt=loads[WITHOUT].prompt, output=2)
        for name, server in servers.items():  # what is done once
            server.bench(_arguments(plan, warm, plan.seed, (None, ())))
            console.print(f"{name}: up", style="dim")
        yield servers, prompts


def _server(plan: VllmPlan, load: ServeLoad, model: Path, more: Row) -> VllmServer:
    """more: options of a side beside those that all have"""
    options = {
        "dtype": plan.dtype,
        "max-num-seqs": load.requests,
        "max-num-batched-tokens": load.chunk,
        "max-model-len": load.longest,
        **({"no-enable-prefix-caching": None} if load.is_ample else {}),
        **more,
    }
    return VllmServer(plan.python, plan.threads, load.num_blocks, model, options)


def _turn(
    plan: VllmPlan, load: ServeLoad, server: VllmServer, console: Console, seed: int, prompts: Prompts
) -> Row:
    """Run the client once, and read the server's metrics meanwhile."""
    before = server.metrics()
    with Gauges(server, RUNNING, (USAGE, RUNNING)) as gauges:
        result = server.bench(_arguments(plan, load, seed, prompts))
    after = server.metrics()
    right = judged(result["generated_texts"], prompts[1]) if prompts[1] else []
    line = f"seed {seed}: {result['duration']:.1f} s, goodput {result['request_goodput']:.4f} requests/s"
    console.print(line + (f", {sum(right)} of {len(right)} right" if right else ""), style="dim")
    running, blocks = gauges.values[RUNNING], [s * (load.num_blocks - 1) for s in gauges.values[USAGE]]
    return {
        **{name: value for name, value in result.items() if not isinstance(value, list)},
        "seed": seed,
        "right": right,
        **{name: after.get(key, 0.0) - before.get(key, 0.0) for name, key in COUNTERS.items()},
        "mean_blocks": fmean(blocks),
        "peak_blocks": round(max(blocks)),
        "mean_running": fmean(running),
        "max_running": round(max(running)),
        "timeline": {"at_s": gauges.at_s, "blocks": blocks, "running": running},
    }


def _row(plan: VllmPlan, load: ServeLoad, system: str, found: Mapping[str, Sequence[Row]], more: Row) -> Row:
    """Return a system's medians over its turns, and the turns.

    found: turns of all systems. A turn's ratio is to the same turn without the plugin; None if that is zero
    """
    turns, base, ours = found[system], found[WITHOUT], system == WITH
    right = [one for turn in turns for one in turn["right"]]
    ratios = {
        name: [own[figure] / other[figure] for own, other in zip(turns, base, strict=True)]
        for name, figure in COMPARED.items()
        if all(one[figure] for one in base)
    }
    return {
        **more,
        "system": system,
        **plan.facts(),
        "policy": plan.policy if ours else None,
        "kv_cache_dtype": AUTO if system == WITHOUT else plan.kv_cache_dtype,
        "budget": more["budget"] if ours else None,
        "interval": plan.interval if ours else None,
        "load": f"{load.requests} x ({load.prompt:,} + {load.output:,})",
        "num_blocks": load.num_blocks - 1,
        "block_size": VLLM_BLOCK_SIZE,
        "rate": None if load.at_once else plan.rate,
        "prompts": plan.prompts,
        "objectives": list(plan.goodput),
        **{f"{name}_ratio": median(ratios[name]) if name in ratios else None for name in COMPARED},
        **{f"{name}_ratios": each for name, each in ratios.items()},
        **{name: median(one[name] for one in turns) for name in FIGURES},
        "right": fmean(right) if right else None,
        "turns": turns,
    }


def _with_ratio(figure: str, name: str) -> Callable[[Row], str]:
    """Format the figure, and for other sides than vLLM's the ratio of this name, if there is one."""
    both = f"{figure} ({{{name}:.2f}} x)"
    return lambda row: (both if row["system"] != WITHOUT and row[name] is not None else figure).format_map(
        row
    )


def _seconds(name: str) -> Callable[[Row], str]:
    """Median and 99th percentile, from milliseconds."""
    return lambda row: ", ".join(f"{row[f'{kind}_{name}_ms'] / 1000:.3g}" for kind in ("median", "p99"))


COLUMNS: Columns = {
    "requests": "{load}",
    "pool, blocks of 32": "{num_blocks:,}",
    "system": lambda row: (
        row["system"] + (f", {row['policy']}, budget {row['budget']}" if row["budget"] else "")
    ),
    "right": "{right:.3f}",
    "steps": _with_ratio("{steps:,.0f}", "steps_ratio"),
    "goodput, requests/s": _with_ratio("{request_goodput:.3f}", "goodput_ratio"),
    "output tokens/s": _with_ratio("{output_throughput:.1f}", "speed_ratio"),
    "slowest to fastest turn": lambda row: (
        f"{min(row['speed_ratios']):.2f} to {max(row['speed_ratios']):.2f} x"
        if row["system"] != WITHOUT
        else "-"
    ),
    "first token, s": _seconds("ttft"),
    "per token, s": _seconds("tpot"),
    "between tokens, ms: p50": _with_ratio("{median_itl_ms:.1f}", "itl_ratio"),
    "p99": _with_ratio("{p99_itl_ms:.1f}", "p99_itl_ratio"),
    "seconds": "{duration:,.1f}",
    "preempted": "{preemptions:.0f}",
    "running: mean, maximum": "{mean_running:.1f}, {max_running:.0f}",
    "blocks: mean, maximum": "{mean_blocks:,.0f}, {peak_blocks:,.0f}",
    "passes, seconds in them": "{passes:.0f}, {pass_s:.2f}",
}


def plugin_table(rows: Sequence[Row]) -> str:
    """Format the table in Markdown: latencies are median and 99th percentile."""
    return markdown(COLUMNS, cells(COLUMNS, rows))


def pool_chart(rows: Sequence[Row], out: Path) -> None:
    """Draw the first turns, a column for each case: blocks in use above, running requests below."""
    cases = list(dict.fromkeys(row["case"] for row in rows))
    figure = Figure(figsize=(5.2 * len(cases), 5.2), layout="constrained")
    grid = figure.subplots(2, len(cases), squeeze=False, sharex="col")
    for column, case in enumerate(cases):
        own = [row for row in rows if row["case"] == case]
        grid[0][column].axhline(own[0]["num_blocks"], color="#7f7f7f", linestyle="--", label="the pool")
        labels = {"blocks": "blocks in use", "running": "running requests"}
        for axis, (what, label) in zip(grid[:, column], labels.items(), strict=True):
            for row in own:
                line = row["turns"][0]["timeline"]
                axis.plot(line["at_s"], line[what], color=COLORS[row["system"]], label=row["system"])
            axis.set(ylim=(0, None), xlim=(0, None), ylabel=label)
            axis.grid(alpha=0.3)
        grid[0][column].set_title(f"{own[0]['load']} tokens, budget {own[-1]['budget']}", fontsize=10)
        grid[1][column].set_xlabel("seconds")
    handles, names = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, frameon=False)
    with writing(out):
        figure.savefig(out, dpi=120)


def _arguments(plan: VllmPlan, load: ServeLoad, seed: int, prompts: Prompts) -> list[str]:
    """Arguments of `vllm bench serve`."""
    common = ["--seed", str(seed), "--num-prompts", str(load.requests), "--request-rate"]
    common += ["inf" if load.at_once else str(plan.rate)]
    common += ["--ignore-eos", "--temperature", "0", "--percentile-metrics", ",".join(LATENCIES)]
    common += ["--metric-percentiles", "99", "--goodput", *plan.goodput]
    file, answers = prompts
    if file is not None:
        common += ["--dataset-name", "sharegpt", "--dataset-path", str(file)]
        if answers:
            common += ["--disable-shuffle", "--save-detailed", "--sharegpt-output-len", str(load.output)]
        return common
    spread = json.dumps({"input": 0.0, "output": load.spread})
    return [
        *common,
        *("--dataset-name", "random", "--random-input-len", str(load.prompt)),
        *("--random-output-len", str(load.output), "--random-range-ratio", spread),
    ]
