"""Policies with recall against the same policies with as many more tokens as the digests of pages take.

    scripts/recall_experiment.py --fraction 0.1 --modes query tokens:4 --out recall.json

Of each policy P: P at B tokens, P at B + delta, and recall(P) at B; delta pays for the digests of all pages
and for the recent queries that are kept, so that the last two hold equal bytes on the device. Needles (on the
real model) are asked after the compression, by teacher forcing.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from kvreclaim import LLM, CompressionConfig, demo_model, real_model
from kvreclaim.compression.spec.recall import parse_recall
from kvreclaim.errors import InvalidArgumentError
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.task import Answer, Item, Task
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.schedule.budget.recall import Recall

POLICIES = "knorm,streaming_llm,snapkv,h2o,triattention,query_mixture"
DEMO_TASKS = "chain,recall,multi_query,variable_tracking"
DRAWS = 1_000


@dataclass(frozen=True)
class Row:
    """One setting on one task. right: share of verdicts of each document; low, high: 95 % of bootstrap means.

    delta: tokens per KV head that the plain policy has more
    """

    task: str
    policy: str
    recall: str | None
    budget: float
    delta: float
    accuracy: float
    low: float
    high: float
    right: list[float]
    seconds: float
    peak_blocks: float
    recall_pages: int
    recall_hits: int
    recall_bytes: int
    refused: str | None = None


class Trial:
    """One model and its documents, computed once."""

    def __init__(self, llm: LLM, args: argparse.Namespace) -> None:
        self.llm, self.args = llm, args
        self.size = llm.engine.config.block_size
        self.layer = llm.loaded.facts.layers[0]

    def budget(self, item: Item) -> int:
        return max(1, int(self.args.fraction * item.num_tokens) // self.size) * self.size

    def delta(self, item: Item, recall: Recall) -> int:
        """Tokens per KV head whose keys and values take what digests and kept queries take, rounded up."""
        layer, itemsize = self.layer, self.llm.loaded.facts.dtype.itemsize
        survivors = self.budget(item) - recall.slots(self.size)
        pages = max(0, item.num_tokens - survivors) // self.size
        digest_bytes = pages * (2 * layer.head_dim + 8)
        ring_bytes = recall.every * layer.group_size * layer.head_dim * itemsize * recall.needs_queries
        return -(-(digest_bytes + ring_bytes) // ((layer.head_dim + layer.v_head_dim) * itemsize))

    def run(self, task: Task, items: list[Item], policy: str, recall: str | None, deltas: list[int]) -> Row:
        args, totals = self.args, self.llm.engine.totals
        shared = {"interval": args.interval, "sinks": args.sinks, "recent": args.recent, "recall": recall}
        configs = [
            CompressionConfig(policy, self.budget(item) + delta, **shared) if policy != "full" else None
            for item, delta in zip(items, deltas, strict=True)
        ]
        before, started = asdict(totals), time.perf_counter()
        outs = self.llm.score([list(i.prompt) for i in items], [list(i.continuation) for i in items], configs)
        seconds = time.perf_counter() - started
        errors = [out.error for out in outs if out.error is not None]
        if errors:
            raise SystemExit(f"{policy} {recall}: {errors[0]}")
        answers = [Answer(tuple(out.predicted), tuple(out.logprobs)) for out in outs]
        found = [task.judge(item, answer) for item, answer in zip(items, answers, strict=True)]
        right = [one.points / one.out_of for one in found]
        low, high = interval(right)
        counts = {
            name: getattr(totals, name) - before[name]
            for name in ("recall_pages", "recall_hits", "recall_bytes")
        }
        return Row(
            task.name,
            policy,
            recall,
            statistics.mean(self.budget(item) for item in items),
            statistics.mean(deltas),
            statistics.mean(right),
            low,
            high,
            right,
            seconds,
            statistics.mean(out.metrics.peak_blocks for out in outs),
            **counts,
        )


def interval(values: list[float]) -> tuple[float, float]:
    """95 % of the means of resampled documents."""
    rng = random.Random(0)
    means = sorted(statistics.mean(rng.choices(values, k=len(values))) for _ in range(DRAWS))
    return means[int(0.025 * DRAWS)], means[int(0.975 * DRAWS)]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="real", help="real, demo or a directory")
    parser.add_argument(
        "--tasks", default=None, help=f"needles on the real model, {DEMO_TASKS} on the demo's"
    )
    parser.add_argument("--policies", default=POLICIES)
    parser.add_argument("--modes", nargs="*", default=["query"], help="as CompressionConfig(recall=...)")
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--num-tokens", type=int, default=2500)
    parser.add_argument("--num-examples", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--recent", type=int, default=64)
    parser.add_argument("--cold-size", type=float, default=2.0, help="GiB")
    parser.add_argument("--no-plain", action="store_true", help="the rows with recall alone")
    parser.add_argument("--out", type=Path, default=None)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    model = {"real": real_model, "demo": demo_model}.get(args.model, lambda: args.model)()
    if model is None:
        raise SystemExit("the real model is not there: run `kvreclaim fetch`, or pass --model demo")
    blocks = 2 * args.num_examples * (args.num_tokens // 16 + 2) + 64
    llm = LLM(model, device="cpu", num_blocks=blocks, kv_recall_size=args.cold_size, max_num_seqs=64)
    names = args.tasks or ("needles" if args.model == "real" else DEMO_TASKS)
    tasks = make_tasks(names.split(","), llm, TaskOptions(num_tokens=args.num_tokens))
    trial, rows = Trial(llm, args), []

    def note(row: Row) -> None:
        rows.append(row)
        print(
            f"{row.task:>18} {row.policy:>14} {row.recall or '-':>28} B {row.budget:.1f} + {row.delta:.1f}  "
            f"{row.accuracy:.3f} [{row.low:.3f}, {row.high:.3f}]  {row.seconds:6.1f} s  "
            f"pages {row.recall_pages} hits {row.recall_hits}",
            flush=True,
        )
        if args.out is not None:
            told = {"command": sys.argv[1:], "kernels": llm.engine.kernels, "rows": list(map(asdict, rows))}
            args.out.write_text(json.dumps(told, indent=1) + "\n")

    for task in tasks:
        items = [task.item(args.seed, index) for index in range(args.num_examples)]
        zero = [0] * len(items)
        if not args.no_plain:
            note(trial.run(task, items, "full", None, zero))
        for policy in args.policies.split(","):
            if not args.no_plain:
                note(trial.run(task, items, policy, None, zero))
            for mode in args.modes:
                deltas = [trial.delta(item, parse_recall(mode)) for item in items]
                try:
                    if not args.no_plain:
                        note(trial.run(task, items, policy, None, deltas))
                    note(trial.run(task, items, policy, mode, zero))
                except InvalidArgumentError as error:
                    print(f"{task.name} {policy} {mode}: {error}", flush=True)


if __name__ == "__main__":
    main()
