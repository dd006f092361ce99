"""A load on `vllm serve`: servers with equal pools, and alternating runs of vLLM's own client against them.

Each turn has another seed, and both sides get the same prompts, lengths and arrivals. Ends of text are
ignored, so both generate equally many tokens.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rich.console import Console

from kvreclaim.bench.common import Row
from kvreclaim.bench.plans import VllmPlan
from kvreclaim.bench.systems.vllm_peer import kv_bytes_per_token
from kvreclaim.bench.systems.vllm_server import Gauges, VllmServer
from kvreclaim.bench.vllm_pool import BLOCK_SIZE, WITHOUT
from kvreclaim.calibrate.lookups import lookup_documents
from kvreclaim.corpora import code, prose
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.model_paths import STATS_FILE

USAGE, RUNNING = "vllm:kv_cache_usage_perc", "vllm:num_requests_running"
COUNTERS = {
    "preemptions": "vllm:num_preemptions_total",
    "blocks_freed": "kvreclaim_blocks_freed_total",
    "passes": "kvreclaim_compactions_total",
    "pass_s": "kvreclaim_compression_seconds_total",
}
CODE = 200_000
"""Characters of Python after the English."""
LATENCIES = ("ttft", "tpot", "itl", "e2el")
KINDS, FACTS_SHARE, QUESTION = ("sentences", "records"), 0.2, 32
"""Question types of look-ups; share of facts in a document; tokens reserved for the question."""


@dataclass(frozen=True, slots=True)
class ServeLoad:
    """The load on each server in a turn.

    prompt:         tokens; vLLM's client takes at most 1,024 of a text
    output, spread: tokens of an answer, from output * (1 - spread) to output * (1 + spread)
    num_blocks:     as vLLM's --num-gpu-blocks-override, one of them its null block
    prefix_caching: off where a server gets the same prompts twice
    """

    requests: int = 12
    prompt: int = 512
    output: int = 768
    spread: float = 0.33
    num_blocks: int = 129
    chunk: int = 512
    prefix_caching: bool = True

    @property
    def longest(self) -> int:
        return self.prompt + round(self.output * (1 + self.spread)) + 32  # what text and tokens differ by


@dataclass(frozen=True, slots=True)
class Prompts:
    """file: in ShareGPT's format, which vLLM's client reads without further packages; None: random tokens;
    answers: the correct ones, in the order of the file; empty if there are none"""

    file: Path | None = None
    answers: Sequence[str] = ()

    def right(self, texts: Sequence[str]) -> list[bool]:
        """Return which answers begin with the correct one."""
        pairs = zip(texts, self.answers, strict=True)
        return [re.match(rf"\s*{re.escape(right)}\b", text) is not None for text, right in pairs]


@contextmanager
def serving(
    plan: VllmPlan, load: ServeLoad, options: Mapping[str, Row | None], console: Console
) -> Iterator[tuple[dict[str, VllmServer], list[Prompts]]]:
    """Start and warm up servers by name, and make the prompts of each turn. options: vLLM's
    --additional-config; None: without the plugin.

    Raises: SkipPoint if vLLM fails; InvalidArgumentError if the plugin is not installed.
    """
    with ExitStack() as stack:
        model = stack.enter_context(_without_statistics(plan.model))
        servers = {
            name: stack.enter_context(closing(_server(plan, load, model, option)))
            for name, option in options.items()
        }
        for server in servers.values():
            server.wait()
        for name, option in options.items():
            if option is not None and COUNTERS["passes"] not in servers[name].metrics():
                raise InvalidArgumentError(
                    f"{str(plan.python)!r} does not load kvreclaim's plugin; run `make vllm-env`, which "
                    "installs it there."
                )
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prompts-")))
        prompts = _prompts(plan, load, model, folder)
        warm = ServeLoad(requests=1, prompt=load.prompt, output=2)
        for name, server in servers.items():  # what is done once
            server.bench(_arguments(plan, warm, plan.seed, Prompts()))
            console.print(f"{name}: up", style="dim")
        yield servers, prompts


def _server(plan: VllmPlan, load: ServeLoad, model: Path, option: Row | None) -> VllmServer:
    options = {
        "dtype": plan.dtype,
        "block-size": BLOCK_SIZE,
        "num-gpu-blocks-override": load.num_blocks,
        "max-num-seqs": load.requests,
        "max-num-batched-tokens": load.chunk,
        "max-model-len": load.longest,
        **({} if load.prefix_caching else {"no-enable-prefix-caching": None}),
        **({} if option is None else {"additional-config": json.dumps(option)}),
    }
    pool_bytes = load.num_blocks * BLOCK_SIZE * kv_bytes_per_token(plan.model, 2)
    return VllmServer(plan.python, plan.threads, pool_bytes, model, options, plugin=option is not None)


def turns_of(
    plan: VllmPlan, load: ServeLoad, server: VllmServer, console: Console, prompts: Sequence[Prompts]
) -> Callable[[], Row]:
    """Return a function that runs the client, each time with the next seed and its prompts."""
    turns = enumerate(prompts, plan.seed)
    return lambda: _turn(plan, load, server, console, *next(turns))


def _turn(
    plan: VllmPlan, load: ServeLoad, server: VllmServer, console: Console, seed: int, prompts: Prompts
) -> Row:
    """Run the client once, and read the server's metrics meanwhile."""
    before = server.metrics()
    with Gauges(server, RUNNING, (USAGE, RUNNING)) as gauges:
        result = server.bench(_arguments(plan, load, seed, prompts))
    after = server.metrics()
    right = prompts.right(result["generated_texts"]) if prompts.answers else []
    line = f"seed {seed}: {result['duration']:.1f} s, goodput {result['request_goodput']:.4f} requests/s"
    console.print(line + (f", {sum(right)} of {len(right)} right" if right else ""), style="dim")
    blocks = [share * (load.num_blocks - 1) for share in gauges.values[USAGE]]
    return {
        **{name: value for name, value in result.items() if not isinstance(value, list)},
        "seed": seed,
        "right": right,
        **{name: after.get(key, 0.0) - before.get(key, 0.0) for name, key in COUNTERS.items()},
        "mean_blocks": fmean(blocks),
        "peak_blocks": round(max(blocks)),
        "mean_running": fmean(gauges.values[RUNNING]),
    }


def make_row(
    plan: VllmPlan,
    load: ServeLoad,
    system: str,
    found: Mapping[str, Sequence[Row]],
    *,
    figures: Sequence[str],
    compared: Mapping[str, str],
) -> Row:
    """Return a system's medians over its turns, and the turns.

    found:    turns of all systems
    compared: name of a ratio -> figure. A turn's ratio is to the same turn without the plugin; None if that
              is zero
    """
    turns, base, ours = found[system], found[WITHOUT], system != WITHOUT
    right = [one for turn in turns for one in turn["right"]]
    ratios = {
        name: [own[figure] / other[figure] for own, other in zip(turns, base, strict=True)]
        for name, figure in compared.items()
        if all(one[figure] for one in base)
    }
    return {
        "system": system,
        **plan.facts(),
        "policy": plan.policy if ours else None,
        "budget": plan.budget if ours else None,
        "interval": plan.interval if ours else None,
        "num_blocks": load.num_blocks - 1,
        "block_size": BLOCK_SIZE,
        "rate": plan.rate,
        "prompts": plan.prompts,
        **{f"{name}_ratio": median(ratios[name]) if name in ratios else None for name in compared},
        **{f"{name}_ratios": each for name, each in ratios.items()},
        **{name: median(one[name] for one in turns) for name in figures},
        "right": fmean(right) if right else None,
        "turns": turns,
    }


def with_ratio(figure: str, name: str) -> Callable[[Row], str]:
    """Format the figure, and for sides with the plugin the ratio of this name, if there is one."""
    both = f"{figure} ({{{name}:.2f}} x)"
    return lambda row: (both if row["budget"] and row[name] is not None else figure).format_map(row)


def _arguments(plan: VllmPlan, load: ServeLoad, seed: int, prompts: Prompts) -> list[str]:
    """Arguments of `vllm bench serve`."""
    common = ["--seed", str(seed), "--num-prompts", str(load.requests), "--request-rate", str(plan.rate)]
    common += ["--ignore-eos", "--temperature", "0", "--percentile-metrics", ",".join(LATENCIES)]
    common += ["--metric-percentiles", "99", "--goodput", *plan.goodput]
    if prompts.file is not None:
        common += ["--dataset-name", "sharegpt", "--dataset-path", str(prompts.file)]
        if prompts.answers:
            common += ["--disable-shuffle", "--save-detailed", "--sharegpt-output-len", str(load.output)]
        return common
    spread = json.dumps({"input": 0.0, "output": load.spread})
    return [
        *common,
        *("--dataset-name", "random", "--random-input-len", str(load.prompt)),
        *("--random-output-len", str(load.output), "--random-range-ratio", spread),
    ]


@contextmanager
def _without_statistics(model: Path) -> Iterator[Path]:
    """Link the model's files without the statistics, which vLLM would read as weights."""
    with tempfile.TemporaryDirectory(prefix="served-") as folder:
        for file in model.iterdir():
            if file.name != STATS_FILE and file.suffix != ".gguf":
                Path(folder, file.name).symlink_to(file.resolve())
        yield Path(folder)


def _prompts(plan: VllmPlan, load: ServeLoad, model: Path, folder: Path) -> list[Prompts]:
    """Make the client's prompts of each turn."""
    if plan.prompts == "random":
        return [Prompts()] * plan.turns
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
    return [Prompts(_written(folder / "text.json", talks))] * plan.turns


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
    made = []
    for number in range(plan.turns):
        own = talks[number * load.requests : (number + 1) * load.requests]
        file = _written(folder / f"{number}.json", own)
        made.append(Prompts(file, [answer for _, answer in own]))
    return made


def _written(file: Path, talks: Sequence[Sequence[str]]) -> Path:
    entries = [{"conversations": [{"value": turn} for turn in talk]} for talk in talks]
    file.write_text(json.dumps(entries), encoding="utf-8")
    return file
