"""Compare policies at equal bytes on tasks of the project and on one of your own.

python examples/compare_policies.py [model]
"""

import sys

from kvreclaim import LLM, demo_model
from kvreclaim.eval import Answer, Item, Metric, TaskOptions, TaskScore, evaluate


class Copy:
    """The second half of a sequence repeats the first: one verdict for each of its tokens."""

    name, metric, identity, seeded, compares = "copy", Metric.ACCURACY, {"version": 1}, True, False

    def num_examples(self, wanted: int) -> int:
        return wanted

    def item(self, seed: int, index: int) -> Item:
        half = tuple(20 + (7 * index + 3 * seed + i * i) % 80 for i in range(300))
        return Item(prompt=half, continuation=half)

    def judge(self, item: Item, answer: Answer) -> TaskScore:
        right = [guess == gold for guess, gold in zip(answer.predicted, item.continuation, strict=True)]
        return TaskScore(points=sum(right), out_of=len(right))


if __name__ == "__main__":
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else demo_model(), num_blocks=1000)
    report = evaluate(
        llm,
        policies=["full", "streaming_llm", "knorm", "query_mixture"],
        budgets=[0.5, 0.25],
        tasks=["agreement", Copy()],
        options=TaskOptions(num_tokens=1024),
        num_examples=4,
    )
    for row in report.rows:
        print(row.task, row.policy, f"{row.fraction:.0%} {row.value:.3f}", row.ci95, row.blocks_freed)
