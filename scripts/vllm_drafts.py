"""Speculative decoding inside vLLM with and without compression: how many drafts are accepted.

Requests are real text, English and Python in turns, answered at temperature 0. Whatever drafts, an answer is
what it is without drafts under the same compression, but for ties that sums in another order decide.
"""

from __future__ import annotations

import argparse
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvreclaim.bench import common
from kvreclaim.bench.common import Columns, Row, cells, markdown
from kvreclaim.bench.systems.base import SystemSetup
from kvreclaim.bench.systems.vllm_peer import VllmProcess, kv_bytes_per_token
from kvreclaim.corpora import code, prose
from kvreclaim.memory.blocks import blocks_for
from kvreclaim.model.loader import load_tokenizer
from kvreclaim.model_paths import real_model, statistics_beside

BLOCK_SIZE = 32
NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 3}'


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared. budgets: tokens; the full cache comes first."""

    model: Path
    stats: Path
    python: Path
    speculative: dict[str, Any]
    policy: str
    budgets: tuple[int, ...]
    prompt: int
    output: int
    requests: int
    batch: int
    threads: int


def measure(plan: Plan, budget: int | None) -> Row:
    """Serve all requests, by a server of its own. budget: None is the full cache."""
    with closing(_vllm(plan, budget)) as vllm:
        said = vllm.ask("serve", prompts=_prompts(plan), max_tokens=plan.output)
    return {
        "cache": "full" if budget is None else f"`{plan.policy}`, budget {budget:,}",
        "drafted": said["drafted"],
        "accepted": said["accepted"],
        "tokens": plan.requests * plan.output,
        "answers": said["answers"],
        "elapsed_s": said["elapsed_s"],
    }


def _prompts(plan: Plan) -> list[list[int]]:
    """As many tokens each, from equally distant places of the texts."""
    tokenizer: Any = load_tokenizer(plan.model)
    texts = [tokenizer.encode(text.evaluation[:1_000_000]) for text in (prose(), code())]
    step = min(map(len, texts)) // (plan.requests // 2 + 1)
    starts = [number // 2 * step for number in range(plan.requests)]
    return [list(texts[n % 2][start : start + plan.prompt]) for n, start in enumerate(starts)]


def _vllm(plan: Plan, budget: int | None) -> VllmProcess:
    length = plan.prompt + plan.output
    num_blocks = plan.batch * (blocks_for(length, BLOCK_SIZE) + 2) + 1
    models = [plan.model, *([Path(plan.speculative["model"])] if "model" in plan.speculative else ())]
    per_token = sum(kv_bytes_per_token(model, 2) for model in models)
    process = VllmProcess(plan.python, plan.threads, num_blocks * BLOCK_SIZE * per_token, plugin=True)
    asked = {"policy": plan.policy, "budget": budget, "stats": str(plan.stats)}
    try:
        process.load(
            SystemSetup(plan.model, "bfloat16", plan.threads),
            max_num_seqs=plan.batch,
            max_model_len=length,
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK_SIZE,
            speculative_config=plan.speculative,
            additional_config={} if budget is None else {"kv_compression": asked},
        )
    except BaseException:
        process.close()
        raise
    return process


COLUMNS: Columns = {
    "cache": "{cache}",
    "drafted": "{drafted:,}",
    "accepted": lambda row: f"{row['accepted']:,} ({row['accepted'] / max(1, row['drafted']):.0%})",
    "tokens a step": lambda row: f"{row['tokens'] / row['answers']:.2f}",
}


def _parse() -> Plan:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=real_model(), help="what `kvreclaim fetch` brought")
    parser.add_argument("--stats", type=Path, help="query statistics; those beside the weights where none")
    parser.add_argument("--vllm-python", type=Path, default=Path(".vllm-env/bin/python"))
    parser.add_argument("--speculative-config", type=json.loads, default=NGRAM, help="vLLM's")
    parser.add_argument("--policy", default="shares(surrogate)")
    parser.add_argument("--budgets", default="512,256", help="tokens")
    parser.add_argument("--prompt", type=int, default=1536, help="tokens of each request's text")
    parser.add_argument("--output", type=int, default=192, help="tokens of each answer")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4, help="requests at once")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.model is None:
        parser.error("there is no language model here; run `make real-model`, or pass --model")
    return Plan(
        model=args.model,
        stats=(args.stats or statistics_beside(args.model)).absolute(),
        python=args.vllm_python,
        speculative=args.speculative_config,
        policy=args.policy,
        budgets=tuple(map(int, args.budgets.split(","))),
        prompt=args.prompt,
        output=args.output,
        requests=args.requests,
        batch=args.batch_size,
        threads=args.threads,
    )


def main() -> None:
    plan, console, found = _parse(), common.wide_console(stderr=True), []
    for budget in (None, *plan.budgets):
        found.append(measure(plan, budget))
        console.print(found[-1], style="dim")
    print(markdown(COLUMNS, cells(COLUMNS, found)))


if __name__ == "__main__":
    main()
