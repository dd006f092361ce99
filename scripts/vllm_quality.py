"""The same questions in vLLM and in our own engine, with the same budgets: accuracy of the answers.

Tasks, documents and judges are those of `kvreclaim eval`. Answers are given (teacher forcing): in vLLM a
logits processor of the measuring process makes the engine draw them, and what it would have said is read off
the raw log-probabilities. Each prompt is computed in one chunk, so that both engines compress it once behind
its last token, and again while the answers are computed. vLLM's blocks are of 32 tokens, ours of 16.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from kvreclaim.bench import common
from kvreclaim.bench.common import Columns, Row, cells, markdown
from kvreclaim.bench.systems.base import SystemSetup
from kvreclaim.bench.systems.vllm_peer import VllmProcess, kv_bytes_per_token
from kvreclaim.compression.config import CompressionConfig
from kvreclaim.engine.api.llm import LLM
from kvreclaim.eval.plan import TaskOptions
from kvreclaim.eval.task import Answer, Item, Metric, Task
from kvreclaim.eval.tasks import make_tasks
from kvreclaim.model_paths import real_model, statistics_beside
from kvreclaim.outputs import write_json

BLOCK_SIZE = 32
INTERVAL, SINKS, RECENT = 128, 4, 64
"""As `kvreclaim eval` has them."""
FULL = "full"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is compared. budgets: shares of a sequence's num_tokens; batch: sequences at once."""

    model: Path
    stats: Path
    python: Path
    tasks: tuple[str, ...]
    policies: tuple[str, ...]
    budgets: tuple[float, ...]
    num_tokens: int
    num_examples: int
    batch: int
    threads: int

    @property
    def settings(self) -> list[tuple[str, float]]:
        """(policy, share), the full cache first."""
        return [(FULL, 1.0), *((policy, share) for policy in self.policies for share in self.budgets)]


def run(plan: Plan, console: Console) -> tuple[list[Row], dict[str, str]]:
    """Returns: a row for each task and setting, and the versions of vLLM's environment."""
    tokens = plan.num_tokens * (plan.batch + 1)
    with closing(LLM(plan.model, max_model_len=plan.num_tokens, num_blocks=-(-tokens // 16) * 2)) as ours:
        tasks = make_tasks(plan.tasks, ours, TaskOptions(num_tokens=plan.num_tokens, dialect="text"))
        rows = [row for task in tasks for row in _ours(plan, task, ours, console)]
    with closing(_vllm(plan)) as vllm:
        for task in tasks:
            _theirs(plan, task, vllm, [row for row in rows if row["task"] == task.name], console)
        return rows, vllm.versions()


def _items(plan: Plan, task: Task) -> list[Item]:
    return [task.item(0, index) for index in range(task.num_examples(plan.num_examples))]


def _ours(plan: Plan, task: Task, llm: LLM, console: Console) -> list[Row]:
    items, rows = _items(plan, task), []
    for policy, share in plan.settings:
        budget = round(share * plan.num_tokens)
        config = None
        if policy != FULL:
            config = CompressionConfig(
                policy, budget=budget, stats=plan.stats, interval=INTERVAL, sinks=SINKS, recent=RECENT
            )
        answers = []
        for start in range(0, len(items), plan.batch):
            some = items[start : start + plan.batch]
            said = llm.score(
                [list(item.prompt) for item in some], [list(item.continuation) for item in some], config
            )
            answers += [Answer(tuple(out.predicted), tuple(out.logprobs)) for out in said]
        row: Row = {"task": task.name, "metric": task.metric, "policy": policy, "share": share}
        rows.append(row | {"budget": budget, "examples": len(items), "ours": _value(task, items, answers)})
        console.print(f"{task.name}, {policy}, {share:.0%}: ours {rows[-1]['ours']:.4f}", style="dim")
    return rows


def _vllm(plan: Plan) -> VllmProcess:
    num_blocks = plan.batch * -(-plan.num_tokens // BLOCK_SIZE) + 2
    pool_bytes = num_blocks * BLOCK_SIZE * kv_bytes_per_token(plan.model, 2)
    process = VllmProcess(plan.python, plan.threads, pool_bytes, plugin=True)
    largest = round(max(plan.budgets) * plan.num_tokens)
    asked = {"policy": plan.policies[0], "budget": largest, "stats": str(plan.stats)}
    asked |= {"interval": INTERVAL, "sinks": SINKS, "recent": RECENT}
    try:
        process.load(
            SystemSetup(plan.model, "bfloat16", plan.threads),
            max_num_seqs=plan.batch,
            max_model_len=plan.num_tokens,
            max_num_batched_tokens=plan.batch * plan.num_tokens,
            num_gpu_blocks_override=num_blocks,
            block_size=BLOCK_SIZE,
            forced=True,
            additional_config={"kv_compression": asked},
        )
    except BaseException:
        process.close()
        raise
    return process


def _theirs(plan: Plan, task: Task, vllm: VllmProcess, rows: Sequence[Row], console: Console) -> None:
    """Add vLLM's figures to the rows of the task."""
    items = _items(plan, task)
    for row in rows:
        settings = "off" if row["policy"] == FULL else {"policy": row["policy"], "budget": row["budget"]}
        said = vllm.ask(
            "score",
            prompts=[list(item.prompt) for item in items],
            continuations=[list(item.continuation) for item in items],
            settings=settings,
        )
        pairs = zip(said["predicted"], said["logprobs"], strict=True)
        answers = [Answer(tuple(predicted), tuple(logprobs)) for predicted, logprobs in pairs]
        row["vllm"], row["blocks"] = _value(task, items, answers), said["blocks"]
        console.print(
            f"{task.name}, {row['policy']}, {row['share']:.0%}: vLLM {row['vllm']:.4f}", style="dim"
        )


def _value(task: Task, items: Sequence[Item], answers: Sequence[Answer]) -> float:
    """Points over those there are: a share of right tokens, or nats a token."""
    outcomes = [task.judge(item, answer) for item, answer in zip(items, answers, strict=True)]
    return sum(each.points for each in outcomes) / sum(each.out_of for each in outcomes)


def quality_table(rows: Sequence[Row]) -> str:
    """As a document shows it."""
    return markdown(COLUMNS, cells(COLUMNS, rows))


def _figure(row: Row, name: str) -> str:
    return f"{row[name]:.3f}"


def _difference(row: Row) -> str:
    """In points of a share; in nats of perplexity."""
    if row["metric"] is Metric.PERPLEXITY:
        return f"{row['vllm'] - row['ours']:+.3f} nats"
    return f"{100 * (row['vllm'] - row['ours']):+.1f} points"


COLUMNS: Columns = {
    "task": "{task}",
    "policy": "`{policy}`",
    "kept": lambda row: f"{row['share']:.0%}",
    "our engine": lambda row: _figure(row, "ours"),
    "vLLM": lambda row: _figure(row, "vllm"),
    "difference": _difference,
    "blocks a request holds at its end": "{blocks}",
}


def _parse() -> tuple[Plan, Path | None]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=real_model(), help="what `kvreclaim fetch` brought")
    parser.add_argument("--stats", type=Path, help="query statistics; those beside the weights where none")
    parser.add_argument("--vllm-python", type=Path, default=Path(".vllm-env/bin/python"))
    parser.add_argument("--tasks", default="needles,perplexity:prose", help="names of `kvreclaim eval`")
    parser.add_argument(
        "--policies", default="shares(surrogate),lagkv", help="vLLM is started with the first"
    )
    parser.add_argument("--budgets", default="0.2,0.1", help="shares of a sequence's tokens")
    parser.add_argument("--num-tokens", type=int, default=2560, help="of prompt and answers together")
    parser.add_argument("--num-examples", type=int, default=24, help="of each task")
    parser.add_argument("--batch-size", type=int, default=4, help="sequences at once")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.model is None:
        parser.error("there is no language model here; run `make real-model`, or pass --model")
    stats = args.stats or statistics_beside(args.model)
    if not stats.is_file():
        parser.error(f"{str(stats)!r} is no file; run `kvreclaim calibrate` and pass --stats")
    plan = Plan(
        model=args.model,
        stats=stats.absolute(),
        python=args.vllm_python,
        tasks=tuple(args.tasks.split(",")),
        policies=tuple(args.policies.split(",")),
        budgets=tuple(float(share) for share in args.budgets.split(",")),
        num_tokens=args.num_tokens,
        num_examples=args.num_examples,
        batch=args.batch_size,
        threads=args.threads,
    )
    return plan, args.json


def main() -> None:
    plan, json_file = _parse()
    rows, versions = run(plan, common.wide_console(stderr=True))
    print(quality_table(rows))
    if json_file is not None:
        command = shlex.join(["python", *sys.argv])
        write_json(json_file, common.report(rows, command, peer_versions=versions))


if __name__ == "__main__":
    main()
