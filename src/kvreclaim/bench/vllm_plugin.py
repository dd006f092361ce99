"""vLLM with and without the plugin: `vllm serve` with equal pools, and vLLM's own client against both.

The sides take turns. Each turn has another seed, and both sides get the same prompts, lengths and arrivals.
Ends of text are ignored, so both generate equally many tokens. Answers are judged if the prompts are
look-ups: a question with a known answer follows a document, and an answer is correct if it begins with it.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems.server_process import Gauges, VllmServer
from kvreclaim.bench.systems.worker_process import kv_bytes_per_token, link_model
from kvreclaim.calibrate.lookups import lookup_documents
from kvreclaim.checks import require
from kvreclaim.corpora import code, prose
from kvreclaim.model_paths import statistics_beside
from kvreclaim.outputs import writing

BLOCK_SIZE = 32
"""Smallest block size that vLLM's CPU attention takes for all models; tokens."""
WITHOUT, WITH = "vLLM", "vLLM + kvreclaim"
COLORS = {WITHOUT: "#d62728", WITH: "#2ca02c"}
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
CODE = 200_000
"""Characters of Python after the English."""
KINDS, FACTS_SHARE, QUESTION = ("sentences", "records"), 0.2, 32
"""Question types of look-ups; share of facts in a document; tokens reserved for the question."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLoad:
    """The load on each server in a turn.

    prompt:         tokens; vLLM's client takes at most 1,024 of a text
    output, spread: tokens of an answer, from output * (1 - spread) to output * (1 + spread)
    num_blocks:     as vLLM's --num-gpu-blocks-override, one of them its null block
    budget:         tokens that the plugin keeps; None: the plan's
    at_once:        all requests are sent at once, instead of at the plan's rate
    is_ample:       the pool holds all requests whole; prefix caching is then off, as it would share prompts
                    between turns
    """

    requests: int = 12
    prompt: int = 512
    output: int = 768
    spread: float = 0.33
    num_blocks: int = 129
    chunk: int = 512
    budget: int | None = None
    at_once: bool = False
    is_ample: bool = False

    @property
    def longest(self) -> int:
        return self.prompt + round(self.output * (1 + self.spread)) + 32  # what text and tokens differ by


ALL_AT_ONCE: dict[str, Any] = {"spread": 0.0, "chunk": 2048, "at_once": True}
LOOKUPS = ServeLoad(requests=16, prompt=992, output=128, spread=0.0, num_blocks=97)
LOADS = {
    "small": ServeLoad(requests=10, prompt=800, output=400, num_blocks=130, budget=256, **ALL_AT_ONCE),
    "large": ServeLoad(requests=32, prompt=2048, output=2048, num_blocks=769, budget=512, **ALL_AT_ONCE),
    "serve": ServeLoad(),
    "plenty": ServeLoad(num_blocks=12 * 50 + 1, is_ample=True),
}
"""By case. In `serve` memory is the limit; in `plenty` a request ends within 50 blocks."""


Prompts = tuple[Path | None, Sequence[str]]
"""A turn's file in ShareGPT's format, which vLLM's client reads without further packages, or None for random
tokens; and the correct answers in the file's order, if there are any."""


def run(plan: VllmPlan, case: str, console: Console) -> list[Row]:
    """Serve the case's load on both sides alternately. Returns: two rows, with `turns` after the medians.

    Raises: SkipPoint if vLLM fails; InvalidArgumentError if the plugin is not installed; RuntimeError if
    the sides did not do the same work, or not under the case's circumstances.
    """
    load = LOOKUPS if plan.prompts == "lookups" and case == "serve" else LOADS[case]
    budget = load.budget or plan.budget
    with _serving(plan, load, budget, console) as (servers, prompts):
        seeds = {name: enumerate(prompts, plan.seed) for name in servers}

        def turn(name: str) -> Row:
            return _turn(plan, load, servers[name], console, *next(seeds[name]))

        found = alternate({name: partial(turn, name) for name in servers}, plan.turns)
    _check(load, found[WITHOUT], found[WITH])
    return [_row(plan, load, system, found, {"case": case, "budget": budget}) for system in found]


def _check(load: ServeLoad, without: Sequence[Row], ours: Sequence[Row]) -> None:
    """Raises: RuntimeError."""
    for plain, other in zip(without, ours, strict=True):
        wrong = {
            "the sides answered different numbers of tokens": plain["total_output_tokens"]
            != other["total_output_tokens"],
            "a request was preempted": load.is_ample and plain["preemptions"] + other["preemptions"] > 0,
            "the plugin has not compressed": not other["passes"],
            "passes ran without the plugin": plain["passes"] > 0,
        }
        for what, holds in wrong.items():
            if holds:
                raise RuntimeError(f"in the turn with seed {plain['seed']} {what}")


@contextmanager
def _serving(
    plan: VllmPlan, load: ServeLoad, budget: int, console: Console
) -> Iterator[tuple[dict[str, VllmServer], list[Prompts]]]:
    """Start and warm up both servers, and make the prompts of each turn."""
    stats = plan.stats or statistics_beside(plan.model)
    settings: Row = {"policy": plan.policy, "budget": budget, "interval": plan.interval}
    settings |= {"stats": str(stats.absolute())} if stats.is_file() else {}
    with ExitStack() as stack, tempfile.TemporaryDirectory(prefix="served-") as folder:
        model = Path(folder, "model")
        link_model(plan.model, model)
        servers = {WITHOUT: _server(plan, load, model, {})}
        stack.enter_context(closing(servers[WITHOUT]))
        ours = {"additional-config": json.dumps({"kv_compression": settings})}
        servers[WITH] = stack.enter_context(closing(_server(plan, load, model, ours)))
        for server in servers.values():
            server.wait()
        require(
            COUNTERS["passes"] in servers[WITH].metrics(),
            f"{str(plan.python)!r} does not load kvreclaim's plugin; run `make vllm-env`, which installs it "
            "there.",
        )
        prompts = make_prompts(plan, load, model, Path(folder))
        warm = ServeLoad(requests=1, prompt=load.prompt, output=2)
        for name, server in servers.items():  # what is done once
            server.bench(_arguments(plan, warm, plan.seed, (None, ())))
            console.print(f"{name}: up", style="dim")
        yield servers, prompts


def _server(plan: VllmPlan, load: ServeLoad, model: Path, ours: Row) -> VllmServer:
    """ours: options of the side with the plugin; empty for the other side"""
    options = {
        "dtype": plan.dtype,
        "block-size": BLOCK_SIZE,
        "num-gpu-blocks-override": load.num_blocks,
        "max-num-seqs": load.requests,
        "max-num-batched-tokens": load.chunk,
        "max-model-len": load.longest,
        **({"no-enable-prefix-caching": None} if load.is_ample else {}),
        **ours,
    }
    pool_bytes = load.num_blocks * BLOCK_SIZE * kv_bytes_per_token(plan.model, 2)
    return VllmServer(plan.python, plan.threads, pool_bytes, model, options, plugin=bool(ours))


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

    found: turns of both systems. A turn's ratio is to the same turn without the plugin; None if that is zero
    """
    turns, base, ours = found[system], found[WITHOUT], system != WITHOUT
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
        "budget": more["budget"] if ours else None,
        "interval": plan.interval if ours else None,
        "load": f"{load.requests} x ({load.prompt:,} + {load.output:,})",
        "num_blocks": load.num_blocks - 1,
        "block_size": BLOCK_SIZE,
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
    """Format the figure, and for the side with the plugin the ratio of this name, if there is one."""
    both = f"{figure} ({{{name}:.2f}} x)"
    return lambda row: (both if row["budget"] and row[name] is not None else figure).format_map(row)


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
        f"{min(row['speed_ratios']):.2f} to {max(row['speed_ratios']):.2f} x" if row["budget"] else "-"
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


def judged(texts: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """Return which texts begin with the correct answer."""
    pairs = zip(texts, answers, strict=True)
    return [re.match(rf"\s*{re.escape(right)}\b", text) is not None for text, right in pairs]


def make_prompts(plan: VllmPlan, load: ServeLoad, model: Path, folder: Path) -> list[Prompts]:
    """Make the client's prompts of each turn."""
    if plan.prompts == "random":
        return [(None, ())] * plan.turns
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if plan.prompts == "lookups":
        return _lookups(plan, load, tokenizer, folder)
    text = f"{prose().evaluation}\n\n{code().evaluation[:CODE]}"
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    rng, talks, at = random.Random(plan.seed), [], 0
    low, high = round(load.output * (1 - load.spread)), round(load.output * (1 + load.spread))
    while at + load.prompt + high <= len(ids):
        end = at + load.prompt + rng.randint(low, high)
        parts = ids[at : at + load.prompt], ids[at + load.prompt : end]
        talks.append(tuple(str(tokenizer.decode(part)) for part in parts))
        at = end
    return [(_written(folder / "text.json", talks), ())] * plan.turns


def _lookups(plan: VllmPlan, load: ServeLoad, tokenizer: Any, folder: Path) -> list[Prompts]:
    """Put one question after each document. The kinds alternate; no document is repeated."""
    ids = tokenizer(prose().evaluation, add_special_tokens=False, verbose=False).input_ids
    documents = lookup_documents(
        tokenizer,
        ids,
        count=plan.turns * load.requests,
        num_tokens=load.prompt - QUESTION,
        seed=plan.seed,
        kinds=KINDS,
        facts_share=FACTS_SHARE,
    )
    rng, talks = random.Random(plan.seed), []
    for number, document in enumerate(documents):
        kind = KINDS[number % len(KINDS)]
        one = rng.choice([each for each in document.questions if each.kind == kind])
        talks.append((tokenizer.decode(document.prompt + one.question), tokenizer.decode(one.answer).strip()))
    rng.shuffle(talks)  # windows of the text that begin together overlap
    made: list[Prompts] = []
    for number in range(plan.turns):
        own = talks[number * load.requests : (number + 1) * load.requests]
        file = _written(folder / f"{number}.json", own)
        made.append((file, [answer for _, answer in own]))
    return made


def _written(file: Path, talks: Sequence[Sequence[str]]) -> Path:
    entries = [{"conversations": [{"value": turn} for turn in talk]} for talk in talks]
    file.write_text(json.dumps(entries), encoding="utf-8")
    return file
