"""`vllm serve` with and without the plugin, and `vllm bench serve` against both: goodput at equal memory.

Two servers with pools of equally many blocks of equal size, and vLLM's own client with the same seed: the
same prompts, lengths and arrivals for both. They take turns; each turn has another seed. Memory is what
binds: the pool holds less than three requests at their ends, and all come within seconds. Ends of text are
ignored, so both sides answer equally many tokens. What the answers are worth is not looked at here.
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from statistics import fmean, median

from rich.console import Console

from kvreclaim.bench.common import Columns, Row, alternate, cells, markdown
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems.vllm_peer import kv_bytes_per_token
from kvreclaim.bench.systems.vllm_server import Gauges, VllmServer
from kvreclaim.bench.vllm_pool import BLOCK_SIZE, WITH, WITHOUT, option_of
from kvreclaim.corpora import code, prose
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model_paths import STATS_FILE

USAGE, RUNNING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running"
PREEMPTIONS, FREED = "vllm:num_preemptions_total", "kvreclaim_blocks_freed_total"
CODE = 200_000
"""Characters of Python behind the English."""
LATENCIES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """The load on each server in a turn.

    output, spread: tokens of an answer, from output * (1 - spread) to output * (1 + spread)
    num_blocks:     as vLLM's --num-gpu-blocks-override, one of them its null block
    """

    requests: int = 12
    prompt: int = 512
    output: int = 768
    spread: float = 0.33
    num_blocks: int = 129
    budget: int = 256
    chunk: int = 512

    @property
    def longest(self) -> int:
        return self.prompt + round(self.output * (1 + self.spread)) + 32  # what text and tokens differ by


LOAD = ServeLoad()


def run(plan: VllmPlan, console: Console) -> list[Row]:
    """Serve the load on both sides in turns. Returns: two rows, with `turns` behind the medians.

    Raises: SkipPoint where vLLM fails; InvalidArgumentError where the plugin is not installed.
    """
    with ExitStack() as stack:
        model = stack.enter_context(_without_statistics(plan.model))
        servers = {
            WITHOUT: stack.enter_context(closing(_server(plan, model, None))),
            WITH: stack.enter_context(closing(_server(plan, model, option_of(plan, LOAD.budget)))),
        }
        for server in servers.values():
            server.wait()
        if FREED not in servers[WITH].metrics():
            raise InvalidArgumentError(
                f"{str(plan.python)!r} does not load kvreclaim's plugin; run `make vllm-env`, which installs "
                "it there."
            )
        texts = stack.enter_context(_texts(plan, model))
        turns = {
            name: partial(_turn, plan, server, count(plan.seed), texts) for name, server in servers.items()
        }
        for name, server in servers.items():  # what is done once
            server.bench(_arguments(plan, plan.seed, None, requests=1, output=2))
            console.print(f"serve, {name}: up", style="dim")
        found = alternate(turns, plan.turns)
    return _rows(plan, found)


def _server(plan: VllmPlan, model: Path, option: Row | None) -> VllmServer:
    options = {
        "dtype": plan.dtype,
        "block-size": BLOCK_SIZE,
        "num-gpu-blocks-override": LOAD.num_blocks,
        "max-num-seqs": LOAD.requests,
        "max-num-batched-tokens": LOAD.chunk,
        "max-model-len": LOAD.longest,
        **({} if option is None else {"additional-config": json.dumps(option)}),
    }
    pool_bytes = LOAD.num_blocks * BLOCK_SIZE * kv_bytes_per_token(plan.model, 2)
    return VllmServer(plan.python, plan.threads, pool_bytes, model, options, plugin=option is not None)


def _turn(plan: VllmPlan, server: VllmServer, seeds: Iterator[int], texts: Path | None) -> Row:
    """One run of the client, and what the server's metrics said meanwhile."""
    seed, before = next(seeds), server.metrics()
    with Gauges(server, RUNNING, (USAGE, RUNNING)) as gauges:
        result = server.bench(_arguments(plan, seed, texts))
    after = server.metrics()
    blocks = [share * (LOAD.num_blocks - 1) for share in gauges.values[USAGE]]
    return result | {
        "seed": seed,
        "preemptions": after[PREEMPTIONS] - before[PREEMPTIONS],
        "blocks_freed": after.get(FREED, 0.0) - before.get(FREED, 0.0),
        "mean_blocks": fmean(blocks),
        "peak_blocks": round(max(blocks)),
        "mean_running": fmean(gauges.values[RUNNING]),
    }


def _arguments(
    plan: VllmPlan, seed: int, texts: Path | None, *, requests: int = LOAD.requests, output: int = LOAD.output
) -> list[str]:
    """Arguments of `vllm bench serve`."""
    common = ["--seed", str(seed), "--num-prompts", str(requests), "--request-rate", str(plan.rate)]
    common += ["--ignore-eos", "--temperature", "0", "--percentile-metrics", ",".join(LATENCIES)]
    common += ["--metric-percentiles", "99", "--goodput", *plan.goodput]
    if texts is not None:
        return [*common, "--dataset-name", "sharegpt", "--dataset-path", str(texts)]
    ratio = json.dumps({"input": 0.0, "output": LOAD.spread})
    return [
        *common,
        *("--dataset-name", "random", "--random-input-len", str(LOAD.prompt)),
        *("--random-output-len", str(output), "--random-range-ratio", ratio),
    ]


@contextmanager
def _without_statistics(model: Path) -> Iterator[Path]:
    """The model's files by links, without the statistics: vLLM would read them as weights."""
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        for file in model.iterdir():
            if file.name != STATS_FILE and file.suffix != ".gguf":
                Path(folder, file.name).symlink_to(file.resolve())
        yield Path(folder)


@contextmanager
def _texts(plan: VllmPlan, model: Path) -> Iterator[Path | None]:
    """Real text in the form of ShareGPT, which vLLM's client reads without further packages: a passage, and
    as many words behind it as are to be answered. None where the prompts are random tokens."""
    if plan.prompts != "text":
        yield None
        return
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    text = f"{prose().evaluation}\n\n{code().evaluation[:CODE]}"
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    rng, entries, at = random.Random(plan.seed), [], 0
    low, high = round(LOAD.output * (1 - LOAD.spread)), round(LOAD.output * (1 + LOAD.spread))
    while at + LOAD.prompt + high <= len(ids):
        end = at + LOAD.prompt + rng.randint(low, high)
        parts = ids[at : at + LOAD.prompt], ids[at + LOAD.prompt : end]
        entries.append({"conversations": [{"value": tokenizer.decode(part)} for part in parts]})
        at = end
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        json.dump(entries, file)
        file.flush()
        yield Path(file.name)


def _rows(plan: VllmPlan, found: dict[str, list[Row]]) -> list[Row]:
    rows = []
    base = found[WITHOUT]
    for system, turns in found.items():
        rows.append(
            {
                "system": system,
                **plan.facts(),
                "policy": plan.policy if system == WITH else None,
                "budget": LOAD.budget if system == WITH else None,
                "interval": plan.interval if system == WITH else None,
                "num_blocks": LOAD.num_blocks - 1,
                "block_size": BLOCK_SIZE,
                "rate": plan.rate,
                "prompts": plan.prompts,
                "objectives": list(plan.goodput),
                "speed_ratio": _ratio(base, turns, "output_throughput"),
                "goodput_ratio": _ratio(base, turns, "request_goodput"),
                **{name: median(turn[name] for turn in turns) for name in FIGURES},
                "turns": turns,
            }
        )
    return rows


FIGURES = (
    *("completed", "output_throughput", "request_goodput", "preemptions", "blocks_freed"),
    *("mean_blocks", "peak_blocks", "mean_running", "duration"),
    *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("median", "p99")),
)


def _ratio(base: Sequence[Row], turns: Sequence[Row], name: str) -> float | None:
    """Median of the turns' own ratios; None where the other side has none."""
    if not all(turn[name] for turn in base):
        return None
    return median(own[name] / other[name] for own, other in zip(turns, base, strict=True))


def _beside(figure: str, ratio: str) -> Callable[[Row], str]:
    """The figure, and for the side with the plugin what it is of the other's, if that has any."""
    both = f"{figure} ({{{ratio}:.2f}} x)"
    return lambda row: (both if row["budget"] and row[ratio] is not None else figure).format_map(row)


def _seconds(name: str) -> Callable[[Row], str]:
    """Median and 99th percentile, of milliseconds."""
    return lambda row: ", ".join(f"{row[f'{kind}_{name}_ms'] / 1000:.3g}" for kind in ("median", "p99"))


COLUMNS: Columns = {
    "system": lambda row: (
        row["system"] + (f", {row['policy']}, budget {row['budget']}" if row["budget"] else "")
    ),
    "answers": "{completed:.0f}",
    "goodput, requests/s": _beside("{request_goodput:.3f}", "goodput_ratio"),
    "output tokens/s": _beside("{output_throughput:.1f}", "speed_ratio"),
    "first token, s": _seconds("ttft"),
    "per token, s": _seconds("tpot"),
    "to the end, s": _seconds("e2el"),
    "preempted": "{preemptions:.0f}",
    "running": "{mean_running:.1f}",
    "blocks: mean, most": "{mean_blocks:.0f}, {peak_blocks:.0f}",
}


def serve_table(rows: Sequence[Row]) -> str:
    """The table for a document, in Markdown: latencies are median and 99th percentile."""
    return markdown(COLUMNS, cells(COLUMNS, rows))
